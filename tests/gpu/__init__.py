"""Checks and measurements of Braid on real GPUs: `make gpu` (docs/cuda.md, *The first GPU*).

Of what Braid is installed with only PyTorch, NumPy, pytest and, for kernels, Triton are needed. Without a GPU
everything runs on the CPU at tiny sizes, and the report says that it is a stand-in.
"""
