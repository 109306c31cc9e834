"""Prepares data sets: finds files (`corpus.py`), tokenises them, writes token files (`prepare.py`)."""
