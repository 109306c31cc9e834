"""Benchmarks: `overlap.py` compares schedules and peers by turns on one machine, `training.py` Braid with a
plain loop.
"""
