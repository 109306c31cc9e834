"""The report on a machine's GPUs: `python -m braid.jobs.bench report` (`make gpu`).

`claims` says what is claimed and in which part it is looked into; `command` runs the parts, each in a process
of its own (`child`), so that one that crashes or stands still takes nothing with it; `findings` is what a
part writes down, `page` what a person reads. Needs PyTorch and NumPy, for kernels Triton; not Ray, pydantic.
"""
