"""Executes linked code.

`executor.py` is the loop; `bindings.py` binds operators and collectives of layers to modules and groups;
`streams.py` is the protocol of streams, which `gloo_streams.py` implements for CPUs and `cuda_streams.py` for
GPUs; `step_graph.py` captures a step.
"""
