"""Smaller commands: `checkpoint.py`, `demo.py`; `models.py` uses weights; `viewing.py` shows runs, also in
Grafana."""
