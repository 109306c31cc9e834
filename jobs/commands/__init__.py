"""Smaller commands: `checkpoint.py`, `demo.py`; `viewing.py` shows runs, also in Grafana."""
