"""Decides what every rank does in a step, without torch and Ray: everything here is pure.

In reading order: `text` and `mesh` (words of the configuration, ranks), `model` (shapes and graphs of
layers), `schedule` (the instruction set, text, linked code, checks), `generate` (makes schedules), `trace`
(spans and numbers of overlap), `cost` (profiles and the simulator), `plan` (searches). A room imports earlier
rooms only.
"""
