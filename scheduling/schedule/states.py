"""What an optimizer keeps of a parameter between steps: kinds of state, and their bytes."""

from dataclasses import dataclass
from typing import Final

PARAMETER: Final = "parameter"
AVERAGE: Final = "average"
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
MOMENTUM: Final = "momentum"
STATE_KINDS: Final = (PARAMETER, *MOMENTS, MOMENTUM, AVERAGE)
"""All kinds of state: the master weights, AdamW's moments, Muon's momentum, the average of the weights."""

BLOCK: Final = 256
"""Number of elements that share a scale in 8-bit moments."""
LEAST_QUANTISED: Final = 4096
"""Least number of elements of a tensor whose moments are kept in 8 bits (torchao's rule)."""
_CODES: Final = 256
"""Number of values that a code of 8 bits can mean; every tensor of moments holds them as a table in fp32."""


def quantised_elements(elements: int) -> int:
    """Return the number of a tensor's elements whose moments are kept in 8 bits: whole blocks, from the first
    element on; moments of the other elements are kept in fp32."""
    return elements // BLOCK * BLOCK if elements >= LEAST_QUANTISED else 0


@dataclass(frozen=True)
class OptimizerStates:
    """Which states a run keeps; see ``train.optimizer`` and ``train.average`` in the configuration."""

    optimizer: str = "adamw"
    average: bool = False
    """Whether an exponential average of the weights is kept."""

    @property
    def uniform(self) -> bool:
        """Whether all parameters have states of the same size."""
        return self.optimizer == "adamw"

    def kinds(self, *, matrix: bool) -> tuple[str, ...]:
        """Return the kinds of state of a parameter beside its master weights. ``matrix``: whether it holds
        matrices of hidden layers, which Muon updates, and of which moments may be kept in 8 bits."""
        own = (MOMENTUM,) if matrix and self.optimizer == "muon" else MOMENTS
        return (*own, AVERAGE) if self.average else own

    def bytes(self, elements: int, width: int, *, matrix: bool = False) -> int:
        """Return the bytes of these states, master weights apart, for ``elements`` of one parameter.

        ``width``: bytes per element of the master weights.
        """
        count = len(self.kinds(matrix=matrix))
        if self.optimizer != "adamw_8bit":
            return count * elements * width
        whole = quantised_elements(elements) if matrix else 0
        scales_and_table = (whole // BLOCK + _CODES) * 4 if whole else 0
        moments = whole + scales_and_table + (elements - whole) * width
        return len(MOMENTS) * moments + (count - len(MOMENTS)) * elements * width


ADAMW: Final = OptimizerStates()
"""The default."""
