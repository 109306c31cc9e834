"""Makes schedules from a setting, in pure steps.

Begin with `lower.py`, which runs these steps one after the other. `named.py` lists the schedules by name,
`pipelines.py` and `dualpipe_zero_bubble.py` order the blocks, `programs.py` orders the operators of a block,
`update.py` adds sums and steps, `partitions.py` cuts collectives in graphs.
"""
