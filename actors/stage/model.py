"""The chunks of the model that one rank holds: parts with their modules and parameters."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from braid.actors.stage.layers import (
    LayerDefinition,
    ModuleContext,
    TransformerLayer,
    embedding_modules,
    head_modules,
)
from braid.actors.stage.parameters import OperatorModule, Place, StageParameter
from braid.kernels.family import TORCH, OperatorFamily
from braid.kernels.operators.operator import ComputeOperator
from braid.scheduling.fusion import chunk_parts
from braid.scheduling.layer_builder import LayerBuilder
from braid.scheduling.layers import embedding, head
from braid.scheduling.lowering.recompute import with_recompute
from braid.scheduling.operators import Part
from braid.scheduling.sizes import PartSizes
from braid.scheduling.spec import ModelShape, ParallelLayout


def model_parts(sizes: PartSizes, definition: LayerDefinition, recompute: str) -> dict[str, Part]:
    """The graphs of embedding, layer and head under a recompute policy, by name."""
    g = LayerBuilder("layer", sizes)
    parts = (embedding(sizes), g.build(definition.graph(g)), head(sizes))
    return {part.name: with_recompute(part, recompute) for part in parts}


@dataclass(frozen=True, kw_only=True)
class PartInstance:
    """One embedding, layer or head on this rank; ``index`` is the layer's number in the whole model."""

    name: str
    index: int
    modules: dict[str, ComputeOperator]


class StageModel:
    """All parts and parameters of one rank.

    ``chunks`` maps a chunk's number to its parts in the order of the forward pass.
    """

    def __init__(
        self,
        *,
        shape: ModelShape,
        layout: ParallelLayout,
        place: Place,
        sizes: PartSizes,
        device: torch.device,
        dtype: torch.dtype,
        definition: LayerDefinition | None = None,
        operators: OperatorFamily = TORCH,
    ) -> None:
        self.shape = shape
        self.layout = layout
        self.definition = definition or TransformerLayer()
        self.context = ModuleContext(
            sizes=sizes, place=place, device=device, dtype=dtype, operators=operators
        )
        self.chunks: dict[int, tuple[PartInstance, ...]] = {}
        self.parameters: list[StageParameter] = []
        self._tied: StageParameter | None = None
        for chunk in layout.chunks_of(place.position["pp"]):
            self.chunks[chunk] = tuple(self._build_chunk(chunk))

    def _build_chunk(self, chunk: int) -> Iterator[PartInstance]:
        for name, index in chunk_parts(self.layout, self.shape.layers, chunk):
            match name:
                case "embedding":
                    modules = embedding_modules(self.context)
                case "head":
                    modules = head_modules(self.context)
                case _:
                    modules = self.definition.modules(self.context, index)
            yield self._instance(name, index, modules, chunk)

    def _instance(
        self, name: str, index: int, modules: dict[str, OperatorModule], chunk: int
    ) -> PartInstance:
        for entry in modules.values():
            for attribute, slices in entry.slices.items():
                parameter = entry.module.get_parameter(attribute)
                tied = self.shape.tied_head and slices[0].source.name == "embedding.weight"
                if tied and self._tied is not None:
                    setattr(entry.module, attribute, self._tied.tensor)
                    self._tied.operators.append((entry.module, attribute))
                    continue
                held = StageParameter(
                    tensor=parameter,
                    slices=slices,
                    chunk=chunk,
                    shared=tied and self.layout.ends_apart,
                    operators=[(entry.module, attribute)],
                )
                if tied:
                    self._tied = held
                assert set(held.factors) <= set(self.context.place.mesh.cut), slices[0].source.name
                self.parameters.append(held)
        return PartInstance(
            name=name, index=index, modules={key: entry.module for key, entry in modules.items()}
        )

    def initialise(self, seed: int) -> None:
        """Give every parameter its initial value, the same in every layout."""
        for parameter in self.parameters:
            parameter.initialise(seed)
