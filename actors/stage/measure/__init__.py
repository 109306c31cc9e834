"""Measurements on a rank: operators for the profile (`profiling.py`), kernels (`kernel_uses.py`), spans of
steps (`telemetry.py`, `span_stream.py`, `torch_profile.py`), memory."""
