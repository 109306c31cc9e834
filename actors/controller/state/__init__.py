"""Checkpoints of a run and where its state comes from after a failure.

`saving.py` writes checkpoints, `manifest.py` says what a good one is, `homes.py` and `mirror.py` where they
lie, `recovery.py` chooses the source of every shard.
"""
