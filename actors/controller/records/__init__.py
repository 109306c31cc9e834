"""Records of a run: steps, events and incidents (`run_records.py`), a report, spans."""
