"""Prepares data sets: finds files (`corpus.py`), tokenises them, writes token files (`prepare.py`).

Conversations become text in `chat.py`, shards and rows of whole documents are in `shards.py`.
"""
