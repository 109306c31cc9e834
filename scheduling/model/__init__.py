"""The model as graphs of operators.

Begin with `shape.py` (sizes of a model) and `layers.py` (the operators of every built-in layer, written with
`builder.py`). `operators.py` defines the graph, `sizes.py` the sizes on one rank, `flops.py` the useful FLOPs
of a step, `units.py` the parts of a chunk that are scheduled together; `recompute.py` and `stages.py` rewrite
graphs. `presets/`: models and clusters by name.
"""
