"""A schedule: the instruction set, its text, the code it is linked to, and the checks before it runs.

Begin with `operations.py` (the instructions) and `schedule.py` (lists of them per stage). `text.py` reads and
writes; `link.py` makes code (`code.py`) with registers (`frames.py`); `buckets.py` and `sharing.py` insert
sums and gathers; `memory.py` and `validate.py` sweep over code; `timeline.py` and `draw.py` show schedules.
"""
