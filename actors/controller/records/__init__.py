"""What a run writes down: steps, events and incidents (`run_records.py`), a report, spans."""
