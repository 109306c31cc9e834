"""Starts ranks, and watches whether they live.

`group.py` is the controller's view of all ranks; `processes.py` (plain processes) and `placement.py` (Ray)
start them, `numbering.py` numbers them, and `rendezvous.py` takes those that torchrun has started;
`health.py` and `failures.py` notice failures; `elastic.py` follows the size of the cluster.
"""
