"""What a schedule costs, without running it.

`profile.py`: times of operators alone and beside each other, measured; `analytic.py`: the same from a
cluster's rates. `simulate.py` is the door of the simulator, `prices.py` looks costs up, `engine.py` advances
the ranks and `physics.py` says how fast operators that run together advance.
"""
