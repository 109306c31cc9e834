"""The end of a step that leaves gradients and parameters as they are."""

from braid.scheduling.schedule import Gather, Reduce


class NoUpdate:
    """Of code that shares nothing, or whose sums and gathers are not looked at."""

    def start(self, transfer: Reduce | Gather) -> None:
        """Nothing."""

    def wait(self, transfer: Reduce | Gather) -> None:
        """Nothing."""

    def allocate(self, reduce: Reduce) -> None:
        """Nothing."""

    def release(self, gather: Gather) -> None:
        """Nothing."""

    def norm(self) -> None:
        """Nothing."""

    def step(self) -> None:
        """Nothing."""
