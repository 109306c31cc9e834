"""Plans, simulations, profiles, schedules: `cli.py` has the commands, `work.py` does their work, `view.py`
and `pictures.py` show the results.
"""
