"""A rank as a process: its calls, process groups, memory and log.

`interface.py` lists the controller's calls, `worker.py` answers them, `actor.py` is the thin Ray actor around
the worker. `assembly.py` builds a rank; `groups.py` and `membership.py` make and leave process groups.
"""
