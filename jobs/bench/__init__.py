"""Benchmarks: `overlap.py` compares schedules and other PyTorch implementations, alternating on one machine;
`training.py` compares Braid with a plain PyTorch loop.
"""
