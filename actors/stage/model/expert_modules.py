"""Modules of a mixture of experts: experts are divided over ``ep``, the width of each expert over ``tp``."""

from collections.abc import Mapping
from math import prod

from braid.actors.stage.model.context import ModuleContext
from braid.actors.stage.state.parameters import (
    INITIAL_DEVIATION,
    GlobalParameter,
    OperatorModule,
    cut_by_row,
    whole,
)
from braid.kernels.operators.expert_rows import ExpertLoad, ExpertRows
from braid.kernels.operators.grouped_linear import GroupedLinear
from braid.kernels.operators.permute import Regroup
from braid.kernels.operators.router import Router


def expert_modules(context: ModuleContext, name: str) -> dict[str, OperatorModule]:
    """Return the modules of a mixture of experts, by operator. ``name``: prefix of the layer."""
    shape, sizes, operators = context.shape, context.sizes, context.operators
    capacity = shape.capacity(sizes.local_tokens) if shape.capacity_factor else None
    rows = ExpertRows(
        experts=shape.experts,
        tp=sizes.tensor,
        tp_rank=context.place.on(sizes.tensor_axis),
        ep=sizes.ep,
        ep_rank=context.place.on("ep"),
        capacity=capacity,
    )
    visits = sizes.micro_batch * shape.sequence * shape.top_k
    places = {"experts": shape.experts, "capacity": capacity}
    width, hidden = shape.expert_width, shape.hidden
    into = {f"{name}.experts.{part}.weight": (width, hidden) for part in ("gate", "up")}
    out_of = {f"{name}.experts.down.weight": (hidden, width)}
    return {
        "router": _router(context, f"{name}.router"),
        "router_load": OperatorModule(module=ExpertLoad(visits, context.dtype)),
        "router_rows": OperatorModule(module=rows),
        "permute": OperatorModule(module=operators.permute(**places)),
        "expert_order": OperatorModule(module=Regroup()),
        "expert_in": _grouped(context, into, {1: context.tensor}, INITIAL_DEVIATION),
        "activation": context.activation(),
        "expert_out": _grouped(context, out_of, {2: context.tensor}, context.smaller),
        "expert_return": OperatorModule(module=Regroup(back=True)),
        "unpermute": OperatorModule(module=operators.unpermute(**places)),
    }


def _router(context: ModuleContext, name: str) -> OperatorModule:
    shape = context.shape
    router = Router(
        hidden=shape.hidden,
        experts=shape.experts,
        top_k=shape.top_k,
        softmax_after=shape.softmax_after,
        normalised=shape.normalised,
        balance_loss=shape.balance_loss,
        z_loss=shape.z_loss,
        bias_balanced=shape.balance_rate > 0,
        mixer_jitter=shape.mixer_jitter,
        evenly=shape.route_evenly,
        **context.home,
    )
    size = (shape.experts, shape.hidden)
    weight = GlobalParameter(name=f"{name}.weight", shape=size, deviation=INITIAL_DEVIATION, hidden=False)
    slices = {"weight": whole(weight)}
    if shape.balance_rate:
        bias = GlobalParameter(name=f"{name}.bias", shape=(shape.experts,), sign_rate=shape.balance_rate)
        slices["bias"] = whole(bias)
    return OperatorModule(module=router, slices=slices)


def _grouped(
    context: ModuleContext,
    matrices: Mapping[str, tuple[int, int]],
    cuts: Mapping[int, tuple[str, ...]],
    deviation: float,
) -> OperatorModule:
    """Build the grouped matrices of this rank's experts: one global tensor, or several whose experts
    alternate.

    ``matrices``: (outputs, inputs) of one expert, by the global tensor's name; ``cuts``: mesh factors that
    cut a tensor's dim.
    """
    experts, place = context.shape.experts, context.place
    sources = [
        GlobalParameter(name=name, shape=(experts, *size), deviation=deviation)
        for name, size in matrices.items()
    ]
    slices = cut_by_row(sources, place, {0: place.mesh.factors_of("ep"), **cuts})
    held = experts // context.sizes.ep
    inputs = slices[0].sizes[2]
    outputs = sum(prod(piece.sizes) for piece in slices) // (held * inputs)
    module = GroupedLinear(experts=held, inputs=inputs, outputs=outputs, **context.home)
    return OperatorModule(module=module, slices={"weight": slices})
