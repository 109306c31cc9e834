"""One rank of a run, which executes a schedule.

The controller calls `rank/worker.py`, which `rank/assembly.py` builds. `run/` executes linked code, `model/`
holds the stage's modules, `state/` its parameters, gradients, optimizer and checkpoints, `data/` its samples,
`measure/` its profile and spans; `files/` reads files that may be damaged or missing.
"""
