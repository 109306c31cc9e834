"""Fault drills: `plan.py` draws faults, `runner.py` breaks a run with them, `report.py` reports the outcome
of each.
"""
