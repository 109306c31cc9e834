"""Checks and measurements of Braid on real GPUs: `make gpu` (docs/cuda.md, *The first GPU*).

Needs PyTorch, NumPy, pytest and, for kernels, Triton; nothing else that Braid is installed with. Without a
GPU everything runs on the CPU at tiny sizes, and the report says that it is a stand-in.
"""
