"""Triton versions of operators that are limited by memory, where an H100 ran them faster than PyTorch's.

There is one module per family: the kernels, and the classes that launch them, with the contract and the saved
values of `braid.kernels.operators`. Importing a module imports Triton; nothing outside this folder does,
unless ``train.kernels`` asks for it. Results do not depend on the number of multiprocessors: no sum is formed
by atomic additions.

Triton's interpreter (environment ``TRITON_INTERPRET=1``, read when Triton is imported) runs the kernels on a
CPU.
"""
