"""The chunks of the model that one rank holds: parts with their modules and parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from braid.actors.stage.model.context import ModuleContext
from braid.actors.stage.model.layers import LayerDefinition, embedding_modules, head_modules, load_layers
from braid.actors.stage.state.parameters import (
    OperatorModule,
    ParameterSlice,
    Place,
    StageParameter,
    main_gradient_dtype,
)
from braid.kernels.family import TORCH, OperatorFamily
from braid.kernels.operators.dropout import site_number
from braid.kernels.operators.operator import ComputeOperator
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.layers import model_parts
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.model.units import chunk_parts
from braid.scheduling.schedule.buckets import Buckets
from braid.scheduling.text.pattern import base_kind, is_layer


@dataclass(frozen=True, kw_only=True)
class PartInstance:
    """One embedding, layer or head on this rank; ``index`` is the layer's number in the whole model."""

    name: str
    index: int
    modules: dict[str, ComputeOperator]


class StageModel:
    """All parts and parameters of one rank. ``layers``: definitions of layers by kind, by default the
    built-in layers.

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
        layers: Mapping[str, LayerDefinition] | None = None,
        operators: OperatorFamily = TORCH,
    ) -> None:
        self.shape = shape
        self.layout = layout
        self.layers = layers or load_layers({})
        self.context = ModuleContext(
            sizes=sizes, place=place, device=device, dtype=dtype, operators=operators
        )
        self.chunks: dict[int, tuple[PartInstance, ...]] = {}
        self.parameters: list[StageParameter] = []
        self._tied: StageParameter | None = None
        self._kinds = sizes.kinds
        graphs = model_parts(sizes, {kind: definition.graph for kind, definition in self.layers.items()})
        parts = {
            chunk: chunk_parts(layout, self._kinds, chunk) for chunk in layout.chunks_of(place.position["pp"])
        }
        members = {chunk: [graphs[name] for name, _ in own] for chunk, own in parts.items()}
        self._buckets = Buckets(members, layout)
        for chunk, own in parts.items():
            self.chunks[chunk] = tuple(
                self._instance(name, index, chunk, part) for part, (name, index) in enumerate(own)
            )

    def _modules(self, name: str, index: int) -> dict[str, OperatorModule]:
        context = replace(self.context, sizes=self.context.sizes.of_kind(name))
        match base_kind(name):
            case "embedding":
                return embedding_modules(context)
            case "head":
                return head_modules(context)
            case kind:
                return self.layers[kind].modules(context, index)

    @property
    def tells_loss(self) -> bool:
        """Whether this rank reports losses, which are equal on all ranks along tp."""
        return self.context.place.on("tp") == 0

    def _trains(self, slices: Sequence[ParameterSlice]) -> bool:
        """Return whether a parameter is trained: all are, unless the model has adapters."""
        return self.shape.lora is None or slices[0].source.adapter

    def _instance(self, name: str, index: int, chunk: int, part: int) -> PartInstance:
        modules = self._modules(name, index)
        for key, entry in modules.items():
            for attribute, slices in entry.slices.items():
                parameter = entry.module.get_parameter(attribute)
                home = self._buckets.home(chunk, part, key)
                if home is None:
                    raise ValueError(
                        f"layer {name!r}: module {key!r} has the parameter {attribute}, but the layer's "
                        f"graph says that it has none; say how many it has: custom(..., parameters=NUMBER)"
                    )
                tied = self.shape.tied_head and slices[0].source.name == "embedding.weight"
                if tied and self._tied is not None:
                    setattr(entry.module, attribute, self._tied.tensor)
                    self._tied.operators.append((entry.module, attribute))
                    continue
                held = StageParameter(
                    tensor=parameter,
                    slices=slices,
                    chunk=chunk,
                    bucket=home[1],
                    shared=tied and self.layout.ends_apart,
                    trained=self._trains(slices),
                    operators=[(entry.module, attribute)],
                )
                if tied:
                    self._tied = held
                assert set(held.factors) <= set(self.context.place.mesh.cut), slices[0].source.name
                self.parameters.append(held)
        return PartInstance(name=name, index=index, modules=_by_operator(modules, index))

    def of_every_kind(self, seed: int) -> dict[str, list[PartInstance]]:
        """Return the rank's parts by name, layers first, with one additional layer of every kind that it does
        not hold.

        The parts are for measurements, which all stages make together. Under ZeRO 2 and 3, which keep only
        shards of gradients, all are new parts: two for each name of which the rank holds several, otherwise
        one.
        """
        held: dict[str, list[PartInstance]] = {kind: [] for kind in self._kinds}
        for instance in (one for instances in self.chunks.values() for one in instances):
            held.setdefault(instance.name, []).append(instance)
        if self.layout.zero > 1:
            counts = {name: min(2, max(1, len(instances))) for name, instances in held.items()}
            return {name: [self._another(name, seed) for _ in range(n)] for name, n in counts.items()}
        return {name: instances or [self._another(name, seed)] for name, instances in held.items()}

    def _another(self, kind: str, seed: int) -> PartInstance:
        """Build a part that this rank does not hold, with gradients that are in no bucket."""
        index = self._kinds.index(kind) if is_layer(kind) else 0
        entries = self._modules(kind, index)
        for entry in entries.values():
            for name, slices in entry.slices.items():
                tensor, operators = entry.module.get_parameter(name), [(entry.module, name)]
                parameter = StageParameter(tensor=tensor, slices=slices, chunk=-1, operators=operators)
                parameter.initialise(seed)
                if self._trains(slices):
                    parameter.gradient = torch.zeros_like(tensor, dtype=main_gradient_dtype(tensor.dtype))
        return PartInstance(name=kind, index=index, modules=_by_operator(entries, index))

    def initialise(self, seed: int) -> None:
        """Set every parameter to its initial value, which is the same in every layout."""
        for parameter in self.parameters:
            parameter.initialise(seed)


def _by_operator(entries: Mapping[str, OperatorModule], index: int) -> dict[str, ComputeOperator]:
    """Return the module of every operator of part ``index``, by the operator's name."""
    found = {}
    for name, entry in entries.items():
        found[name] = entry.module
        found.update({f"{name}{more}": module for more, module in entry.parts.items()})
        entry.module.site = site_number(index, name)
    return found
