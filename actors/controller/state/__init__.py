"""Checkpoints of a run, and the sources of its state after a failure.

`saving.py` writes checkpoints, `manifest.py` defines a good checkpoint, `homes.py` and `mirror.py` know where
checkpoints lie, `recovery.py` chooses the source of every shard.
"""
