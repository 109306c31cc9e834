"""Fault drills: `plan.py` draws faults, `runner.py` breaks a run with them, `report.py` says what came of
each.
"""
