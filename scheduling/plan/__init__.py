"""Searches for a layout, a schedule, and the operators that run together.

Every command calls `decide.py`; `orders.py` searches the orders of a schedule with `pairing.py`,
`list_schedule.py` and `beam.py`; `tiers.py` chooses partitions, `layer_choices.py` degrees and recomputation
of layers, `layouts.py` the layout for a cluster. `plan.py`: the plan as a YAML file.
"""
