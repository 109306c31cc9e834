"""How a run is laid out over ranks; a section of the configuration."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from braid.actors.config.model import Positive, Section
from braid.actors.config.overlap import AUTO, one_of
from braid.scheduling.spec import AXES, CONTEXT_MODES


def _degrees(value: Any) -> Any:
    """``2*4 2`` as ``[4, 4, 2]``; or auto."""
    if not isinstance(value, str) or value == AUTO:
        return value
    found = []
    for word in value.split():
        times, star, degree = word.rpartition("*")
        if not degree.isdigit() or (star and not times.isdigit()):
            raise ValueError(f"{word!r} must be a degree, or NUMBER*DEGREE, as in '12*4 12*2'")
        found += [int(degree)] * int(times or 1)
    return tuple(found)


class ParallelConfig(Section):
    """Degrees of the mesh axes; ``pp`` x ``dp`` x ``cp`` x ``tp`` is the number of ranks.

    ``parallel: auto``: `braid plan` searches them, and a run measures what the machine makes of each;
    ``{auto: true, tp: 8}`` fixes those that are given.
    ``zero`` that is not given is searched by `braid plan`: each layout has the first from 1 on that fits.
    ``ep`` borrows ranks of dp x cp: the innermost ones, as many experts on each.
    """

    dp: Positive = 1  # data: replicas, each with its share of the batch
    tp: Positive = 1  # tensor: matrices are cut, and tokens between them
    pp: Positive = 1  # pipeline: stages of consecutive layers
    cp: Positive = 1  # context: the sequence is cut
    ep: Positive = 1  # expert: experts are cut over ranks of dp and cp
    # tensor-parallel degree of every layer: [4, 4, 2], or "2*4 2"; each divides tp. null: tp. auto: the
    # fastest that fits
    tensor_degrees: Annotated[tuple[Positive, ...] | Literal["auto"], BeforeValidator(_degrees)] | None = None
    auto: bool = False  # search the degrees that are not given
    zero: Annotated[int, Field(ge=0, le=3)] = 0  # cut over dp: 1 optimizer states, 2 gradients, 3 parameters
    shards: Annotated[int, Field(ge=0)] = 0  # ranks of dp that zero cuts over, others hold the same; 0: all
    context: Annotated[str, one_of(CONTEXT_MODES)] = "all_gather"  # how cp exchanges keys and values

    @model_validator(mode="before")
    @classmethod
    def _word(cls, content: Any) -> Any:
        """``auto`` as a word."""
        if isinstance(content, str):
            if content != "auto":
                raise ValueError("must hold degrees, such as {tp: 2}, or be the word auto")
            return {"auto": True}
        return content

    @model_validator(mode="after")
    def _own_degrees(self) -> "ParallelConfig":
        own = self.tensor_degrees
        if self.auto and isinstance(own, tuple):
            raise ValueError(
                f"tensor_degrees={list(own)} belong to one layout, and auto searches layouts; "
                f"set parallel.auto to false and give the degrees, or leave parallel.tensor_degrees out"
            )
        return self

    @property
    def replicas(self) -> int:
        """Ranks that share parameters, each with its share of the tokens."""
        return self.dp * self.cp

    @property
    def fixed(self) -> dict[str, int]:
        """The degrees that the configuration gives."""
        return {axis: getattr(self, axis) for axis in (*AXES, "ep") if axis in self.model_fields_set}
