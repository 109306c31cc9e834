"""Executes linked code.

`executor.py` is the loop; `bindings.py` binds operators and collectives of layers to modules and groups;
`streams.py` is the protocol of streams, for CPUs `gloo_streams.py`, for GPUs `cuda_streams.py`;
`step_graph.py` captures a step.
"""
