"""Collectives over flattened tokens.

`primitives.py`: gather, scatter, reduce, all-to-all over a line of ranks; `stages.py`: collectives in stages
over nodes; `communicator.py`: NCCL and its model; `messages.py`: sends and receives between pipeline stages.
"""
