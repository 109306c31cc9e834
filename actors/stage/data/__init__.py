"""Token files, and which samples a rank reads in which step (`samples.py`, `token_files.py`)."""
