"""A rank as a process: what it can be asked, its process groups, its memory, its log.

`interface.py` lists the controller's calls, `worker.py` answers them, `actor.py` is the thin Ray actor around
it. `assembly.py` puts a rank together; `groups.py` and `membership.py` make and leave process groups.
"""
