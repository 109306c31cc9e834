"""Searches: which layout, which schedule, which operator beside which.

`decide.py` is what every command asks; `orders.py` searches the orders of a schedule with `pairing.py`,
`list_schedule.py` and `beam.py`; `tiers.py` chooses partitions, `layer_choices.py` degrees and recomputation
of layers, `layouts.py` the layout for a cluster. `plan.py`: the plan as a YAML file.
"""
