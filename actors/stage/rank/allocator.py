"""Host memory: glibc's heap, which returns memory to the kernel too early, and Python's objects."""

import ctypes
import gc
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
"""Numbers of parameters of mallopt(3)."""
_LARGEST = 2**31 - 1
_VARIABLES = "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"
"""Environment variables that set the same parameters."""


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next tensors; return whether the C library supports it.

    A training step allocates the same sizes again and again, and on CPU a quarter of the kernel's share of a
    step was page faults (docs/log.md). By default blocks from 128 KiB (later up to 32 MiB) on are mapped and
    unmapped one by one, and the heap's end is trimmed. Other C libraries than glibc are not changed, nor is
    glibc if the environment sets one of these parameters.
    """
    if any(name in os.environ for name in _VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = (
        (_MMAP_THRESHOLD, _LARGEST),
        (_MMAP_MAX, 0),  # older versions refuse thresholds from 32 MiB on
        (_TRIM_THRESHOLD, _LARGEST),
        (_TOP_PAD, 64 << 20),
    )
    return [mallopt(name, value) for name, value in settings][1:] == [1, 1, 1]


def give_back_what_is_free() -> None:
    """Return the free memory of glibc's heap to the kernel; do nothing with other C libraries.

    Where threads free tensors in another order in every step, the heap fragments: the memory in use stays the
    same, but spreads over more and more pages (0.3 MB a step in one measurement: docs/log.md).
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def set_aside_what_lasts() -> None:
    """Exclude all objects that exist now (modules, the model, the schedule) from garbage collection.

    The spans of every step or two would trigger a collection over torch's hundreds of thousands of objects.
    """
    gc.collect(
        1
    )  # garbage of the set-up is young; torch's own objects are old, and looking at them takes long
    gc.freeze()
