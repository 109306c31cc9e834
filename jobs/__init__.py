"""The command line and everything that it starts.

`cli.py` lists the commands. `training/` runs, `planning/` plans, `data/` prepares, `cluster/` finds Ray and
submits, `bench/` compares with other systems, `drill/` breaks runs on purpose, `commands/` has the smaller
commands.
"""
