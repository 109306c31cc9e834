"""A rank's state between steps.

`parameters.py`: names and slices of parameters; `bucket.py` and `buckets.py`: flat memory of a run of
parameters, from the backward pass to the update; `optimizer.py`, with the rules of
`adamw.py` and `muon.py`; `checkpoint.py` and `exchange.py` (Hugging Face's format); `copies.py`: copies in
the memory of other hosts.
"""
