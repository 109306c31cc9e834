"""The command line and everything that it starts.

`cli.py` lists the commands. `training/` trains, `planning/` plans, `data/` prepares data, `cluster/` connects
to Ray and submits jobs, `bench/` compares with other systems, `drill/` breaks runs on purpose, `commands/`
has the smaller commands.

A fault that the user can correct raises `ValueError` (in most places `ConfigError`), with one line that names
key, value and remedy.
"""
