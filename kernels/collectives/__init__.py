"""Collectives over flattened tokens.

`primitives.py`: gather, scatter, reduce, all-to-all over a line of ranks, also in stages over nodes;
`communicator.py`: NCCL on GPUs; `messages.py`: collectives on CPUs, made of sends and receives.
"""
