"""The stage's part of the model as modules.

`model.py` builds the chunks of a stage; `layers.py` has the modules of every built-in layer and the protocol
of user-defined layers, which are written with `context.py`; `routing.py` counts the routers' choices.
"""
