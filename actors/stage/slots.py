"""Where values live between operators: one slot per strand, micro-batch and part of the model."""

from typing import Any

from braid.scheduling.schedule import Strand

SlotKey = tuple[Strand, int, int, int]
"""Strand, micro-batch, chunk, position of the part in its chunk."""

Values = dict[str, Any]


class Slots:
    """Open slots of a rank; at the end of a step there must be none."""

    def __init__(self) -> None:
        self._open: dict[SlotKey, Values] = {}

    def open(self, key: SlotKey) -> Values:
        """Make the slot of a part's forward pass."""
        assert key not in self._open, f"slot {key} is in use"
        values = self._open[key] = {}
        return values

    def reopen(self, key: SlotKey) -> Values:
        """The slot that the forward pass left, for the backward pass."""
        return self._open[key]

    def close(self, key: SlotKey) -> None:
        """Give the slot back; its values must all be gone."""
        values = self._open.pop(key)
        assert not values, f"slot {key} still holds {', '.join(values)}"

    def values(self) -> list[Any]:
        """Everything in open slots but what the executor lends to them (tokens, targets)."""
        return [
            value
            for values in self._open.values()
            for name, value in values.items()
            if name not in ("tokens", "targets")
        ]

    def assert_empty(self) -> None:
        """Check that every slot was closed."""
        assert not self._open, f"slots left open: {', '.join(map(str, self._open))}"
