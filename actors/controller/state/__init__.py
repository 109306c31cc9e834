"""Checkpoints of a run, and where its state comes from after a failure.

`saving.py` writes checkpoints, `manifest.py` defines a good checkpoint, `checkpoint_stores.py` and
`mirror.py` know where checkpoints lie, `recovery.py` chooses the source of every shard and which rank holds
whose copy.
"""
