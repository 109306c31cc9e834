"""`braid train`: `train.py` runs the training, `refusals.py` and `remarks.py` check it before it starts,
`layouts.py` chooses what ``auto`` leaves to measured profiles, `display.py` shows it, `stopping.py` ends it.
"""
