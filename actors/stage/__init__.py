"""One rank: it obeys a schedule.

`rank/worker.py` is what the controller talks to and `rank/assembly.py` builds it. `run/` executes linked
code, `model/` holds the stage's modules, `state/` its parameters, gradients, optimizer and checkpoints,
`data/` its samples, `measure/` its profile and spans, `files/` reads files that may be damaged or gone.
"""
