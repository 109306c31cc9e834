"""`braid plan`, `simulate`, `explain`, `compare`, `profile`: `cli.py` has the commands, `work.py` what they
share.
"""
