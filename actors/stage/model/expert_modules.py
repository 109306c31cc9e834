"""The modules of a mixture of experts: experts are cut over ``ep``, the width of each over ``tp``."""

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
    """Router, permutations and matrices of a mixture of experts, by operator. ``name``: the layer's."""
    shape, sizes, place, operators = context.shape, context.sizes, context.place, context.operators
    router = Router(
        hidden=shape.hidden,
        experts=shape.experts,
        top_k=shape.top_k,
        softmax="after" if shape.softmax_after else "before",
        normalised=shape.normalised,
        balance_loss=shape.balance_loss,
        z_loss=shape.z_loss,
        bias_balanced=shape.balance_rate > 0,
        mixer_jitter=shape.mixer_jitter,
        evenly=shape.route_evenly,
        device=context.device,
        dtype=context.dtype,
    )
    scores = GlobalParameter(
        name=f"{name}.router.weight", shape=(shape.experts, shape.hidden), deviation=INITIAL_DEVIATION
    )
    of_router = {"weight": whole(scores)}
    if shape.balance_rate:
        bias = GlobalParameter(
            name=f"{name}.router.bias", shape=(shape.experts,), sign_rate=shape.balance_rate
        )
        of_router["bias"] = whole(bias)
    capacity = shape.capacity(sizes.local_tokens) if shape.capacity_factor else None
    rows = ExpertRows(
        experts=shape.experts,
        tp=sizes.tensor,
        tp_rank=place.on(sizes.tensor_axis),
        ep=sizes.ep,
        ep_rank=place.on("ep"),
        capacity=capacity,
    )
    visits = sizes.micro_batch * shape.sequence * shape.top_k
    sources, held = sizes.tensor * sizes.ep, shape.experts // sizes.ep
    width, hidden = shape.expert_width, shape.hidden
    deviation = INITIAL_DEVIATION / (2 * shape.layers) ** 0.5
    into = {f"{name}.experts.{part}.weight": (width, hidden) for part in ("gate", "up")}
    return {
        "router": OperatorModule(module=router, slices=of_router),
        "router_load": OperatorModule(module=ExpertLoad(visits, context.dtype)),
        "router_rows": OperatorModule(module=rows),
        "permute": OperatorModule(module=operators.permute(experts=shape.experts, capacity=capacity)),
        "expert_order": OperatorModule(module=Regroup(sources, held)),
        "expert_in": _grouped(context, into, {1: context.tensor}, INITIAL_DEVIATION),
        "activation": context.activation(),
        "expert_out": _grouped(
            context, {f"{name}.experts.down.weight": (hidden, width)}, {2: context.tensor}, deviation
        ),
        "expert_return": OperatorModule(module=Regroup(sources, held, back=True)),
        "unpermute": OperatorModule(module=operators.unpermute(experts=shape.experts, capacity=capacity)),
    }


def _grouped(
    context: ModuleContext,
    matrices: Mapping[str, tuple[int, int]],
    cuts: Mapping[int, tuple[str, ...]],
    deviation: float,
) -> OperatorModule:
    """A matrix of every expert that this rank has, of one global tensor, or of several one by one.

    ``matrices``: outputs and inputs of each, by name; ``cuts``: of a tensor's dims over factors.
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
    module = GroupedLinear(
        experts=held, inputs=inputs, outputs=outputs, device=context.device, dtype=context.dtype
    )
    return OperatorModule(module=module, slices={"weight": slices})
