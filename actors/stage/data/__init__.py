"""Token files, and the samples that a rank reads in each step (`samples.py`, `token_files.py`, `sample_order.py`)."""
