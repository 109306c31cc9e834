"""Computes one operator, or one collective, on tensors.

`operators/` in PyTorch (begin at `operators/operator.py`), `triton/` the faster twins of some operators,
`collectives/` over a process group. `family.py` names the operators that have twins, `choice.py` and
`trials.py` choose by measuring.
"""
