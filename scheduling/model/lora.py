"""Low-rank adapters (LoRA, Hu et al. 2021): y = x W + (alpha / rank) (x A) B, where A and B are trained."""

from dataclasses import dataclass
from typing import Final

from braid.scheduling.text.suggestions import must_be_one_of

TARGETS: Final = ("q", "k", "v", "o", "gate", "up", "down")
"""Names of the matrices of a layer that can have adapters: queries, keys, values and the output of attention;
gate, up and down projection of an MLP."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters beside frozen matrices; all parameters of the model but the adapters' are frozen."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] | None = None
    """Names of the matrices with adapters; None: all of `TARGETS` that the model has."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be at least 1")
        if not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha:g} must be greater than zero")
        if self.targets == ():
            raise ValueError(f"targets=[] leaves nothing to train; name some of {', '.join(TARGETS)}")
        for target in self.targets or ():
            if target not in TARGETS:
                raise ValueError(f"targets: {target!r} {must_be_one_of(target, TARGETS)}")
        if len(set(self.targets or ())) < len(self.targets or ()):
            raise ValueError(f"targets={list(self.targets or ())} names a matrix twice; name it once")

    @property
    def scale(self) -> float:
        """Factor of the adapters' products."""
        return self.alpha / self.rank

    def adapts(self, target: str) -> bool:
        """Return whether matrices of this name have adapters, in layers that have such matrices."""
        return target in (TARGETS if self.targets is None else self.targets)
