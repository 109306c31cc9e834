"""Costs of a schedule, without running it.

`profile.py`: times of operators alone and together, as measured; `analytic.py`: the same from a cluster's
rates. `simulate.py` is the entry of the simulator, `prices.py` looks costs up, `engine.py` advances the ranks
and `physics.py` computes the progress of operators that run together.
"""
