"""Token files (`token_files.py`), and the samples that a rank reads (`samples.py`, `sample_order.py`)."""
