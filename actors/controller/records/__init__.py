"""What a run writes down: steps, events, incidents (`run_records.py`), reports, spans (`span_files.py`)."""
