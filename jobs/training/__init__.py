"""`braid train`: `train.py` runs the training, `refusals.py` and `remarks.py` check it before it starts,
`layouts.py` chooses what ``auto`` leaves to measured profiles, `display.py` shows it, `notebook.py` where
Python is, `callbacks.py` tells a Python caller, `stopping.py` ends it.
"""
