"""Triton twins of operators that move memory: where an H100 showed them to be quicker than PyTorch's.

One module per family: the kernels, and the classes that launch them, with the contract and the saved values
of `braid.kernels.operators`. Importing a module imports Triton; nothing outside this folder does, unless
``train.kernels`` asks for it. Results do not depend on how many multiprocessors there are: no sum is formed
by atomic additions.

Triton's interpreter (environment ``TRITON_INTERPRET=1``, read when Triton is imported) runs them on the CPU.
"""
