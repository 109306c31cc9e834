"""`braid train`: `train.py` carries a run out, `refusals.py` and `remarks.py` look at it before it starts,
`layouts.py` and `layers.py` choose layouts with measured profiles, `display.py` shows it, `stopping.py`
ends it.
"""
