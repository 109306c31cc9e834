"""Drives a run; never touches a tensor.

`controller.py` begins a run and carries it through failures, `generation.py` runs one generation of process
groups, `steps.py` the steps. `planning.py`, `profiling.py`, `combining.py` and `decisions.py` make the plan.
`ranks/` starts ranks and watches whether they live; `state/` has checkpoints and recovery; `records/` writes
the run's files.
"""
