"""`braid train`: `train.py` carries a run out, `refusals.py` and `remarks.py` look at it before it starts,
`layouts.py` chooses what ``auto`` leaves to measured profiles, `display.py` shows it, `stopping.py` ends it.
"""
