"""One file per family of operators: forward, input gradient, weight gradient.

`operator.py` is the protocol; `linear.py` is a short example; `autograd.py` lets autograd differentiate a
module.
"""
