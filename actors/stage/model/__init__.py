"""The stage's part of the model as modules.

`model.py` builds the chunks of a stage, `layers.py` the modules of every built-in layer and the protocol of a
user's own, written with `context.py`; `expert_modules.py` a mixture of experts; `routing.py` counts what
routers do.
"""
