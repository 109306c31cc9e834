"""Makes schedules from a setting, in pure steps.

`named.py` lists the schedules by name, `pipelines.py` and `zero_bubble.py` order the blocks, `programs.py`
orders the operators of a block, `update.py` adds sums and steps, `partitions.py` cuts collectives in graphs.
`lower.py` runs these steps one after the other; begin there.
"""
