"""`braid plan`, `simulate`, `explain`, `compare`, `presets`, `schedule`, `profile`: `cli.py` has them,
`work.py` what they do, `view.py` and `pictures.py` what they show.
"""
