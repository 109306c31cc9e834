"""Kernels of single operators and single collectives on tensors.

`operators/`: in PyTorch (begin at `operators/operator.py`); `triton/`: faster versions of some operators;
`collectives/`: over a process group. `family.py` names the operators that have several implementations;
`choice.py` and `trials.py` choose among these by measuring.
"""
