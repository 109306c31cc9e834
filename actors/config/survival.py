"""What a run saves, and what it does when ranks, nodes or disks fail: three sections of the configuration."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from braid.actors.config.model import Above0, AtLeast0, Count, Positive, Section, clash


class CheckpointConfig(Section):
    """When parameters and optimizer are saved. A checkpoint is always written at the end."""

    every: Count = 0  # steps; 0: as every_s says
    # seconds from one checkpoint to the next; 0: none by time; default: 900 where every is 0, else 0
    every_s: AtLeast0 | None = None
    asynchronous: bool = True  # written in the background while training goes on
    lose_at_most: Positive | None = None  # steps beyond the newest checkpoint; then training waits for a save
    keep: Positive = 2  # newest ones
    keep_every: Count = 0  # steps; checkpoints at their multiples are kept for ever
    # also save and keep the state with the lowest validation loss (train.validate_every)
    keep_best: bool = False
    # a path, or an fsspec URL such as s3://bucket/run: all checkpoints' second home
    mirror: str | None = None
    copies_every: Count = 0  # steps between copies in ranks' memory; 0: none
    copies_mb: Positive | None = None  # of a rank's memory that copies may take; None: no limit

    @property
    def seconds_between(self) -> float:
        """``every_s`` with its default; 0: checkpoints do not depend on the time."""
        return self.every_s if self.every_s is not None else 0.0 if self.every else 900.0

    @model_validator(mode="after")
    def _bound_can_be_kept(self) -> "CheckpointConfig":
        if self.lose_at_most is not None and not 0 < self.every <= self.lose_at_most:
            raise clash(self, "lose_at_most", "every", f"set every to {self.lose_at_most} or less, above 0")
        return self


class FailureConfig(Section):
    """When ranks have failed, and what happens then: those that are gone are replaced, all ranks form a new
    generation, and training goes on from copies in memory (``checkpoint.copies_every``) or from the newest
    good checkpoint.
    """

    # failures that are put up with, of which 100 new steps give one back; 0: the first one ends the run;
    # -1: as many as there are
    max_restarts: Annotated[int, Field(ge=-1)] = 3
    silence_s: Above0 = 8.0  # a rank that does not answer for so long is given up
    stall_s: Above0 = 8.0  # no progress for so long (or 3 steps) is a failure
    # a gradient norm that is no number; retry once, then skip
    on_nan: Literal["retry", "skip", "stop"] = "retry"
    # a loss so many times the median of the last 20: the step is repeated, max_restarts of them; 0: never
    spike: AtLeast0 = 0.0

    @model_validator(mode="after")
    def _above_the_median(self) -> "FailureConfig":
        if 0 < self.spike <= 1:
            raise ValueError(
                f"spike={self.spike:g} would repeat every other step; set it above 1, as to 3, or to 0: never"
            )
        return self


class ElasticConfig(Section):
    """Growing and shrinking while training on Ray: with ``max_ranks`` a run uses what room there is.

    The layout is chosen anew at every change; global batch and order of samples stay.
    """

    min_ranks: Positive | None = None  # with fewer the run waits for nodes; default: 1
    max_ranks: Positive | None = None  # None: the number of ranks is fixed
    settle_s: AtLeast0 = 5.0  # room must be there for so long before it is used
    wait_s: Above0 = 600.0  # for enough nodes, before the run gives up
    # a node that was left out as slow stays out for so long; twice as long each time it is slow again
    quarantine_s: Above0 = 1800.0

    @model_validator(mode="after")
    def _order(self) -> "ElasticConfig":
        if self.max_ranks is not None and (self.min_ranks or 1) > self.max_ranks:
            raise clash(self, "min_ranks", "max_ranks", "set max_ranks to at least as many")
        return self
