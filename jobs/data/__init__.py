"""Prepares data sets: finds files (`corpus.py`), tokenises them, writes token files (`prepare.py`).

Conversations become text in `chat.py`, whole documents become rows in `packing.py`.
"""
