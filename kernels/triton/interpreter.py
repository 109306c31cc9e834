"""Makes Triton 3.6's interpreter work beside NumPy 2.4.

NumPy 2.4 refuses ``int(array)`` for arrays of one element and one dim, as which the interpreter keeps
scalars, so that no loop up to a run-time argument runs.
"""

from typing import Any

from triton.runtime import interpreter


def mend() -> None:
    """Let the interpreter's scalars count loops. Doing it twice is harmless."""
    original = getattr(interpreter, "_patch_lang_tensor", None)
    if original is None or getattr(original, "mended", False):
        return

    def mended(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    mended.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = mended
