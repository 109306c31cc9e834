"""Plans, simulations, profiles, schedules: `cli.py` has the commands, `work.py` what they do; `view.py` and
`pictures.py` show it.
"""
