"""Drives a run; never touches a tensor.

`controller.py` begins a run and carries it through failures, `generation.py` one generation of process
groups, `steps.py` the steps. `planning.py`, `profiling.py`, `combining.py` and `decisions.py` make the plan.
`ranks/`: where ranks run and whether they live; `state/`: checkpoints and recovery; `records/`: what is
written down.
"""
