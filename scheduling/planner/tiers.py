"""Centauri's three tiers for a plan: what each would decide on this job, with the price of the runner-up.

These are estimates beside a plan, no part of its schedule: nothing of them is simulated or executed yet.
"""

from collections.abc import Iterator

from braid.scheduling.analytic import axis_groups
from braid.scheduling.cluster import ClusterSpec
from braid.scheduling.operators import Kind, Operator, Part, Pass
from braid.scheduling.pattern import is_layer
from braid.scheduling.plan import CollectiveNote, TierNote
from braid.scheduling.planner.chain import ChainOperator, Dim, Role, matmul
from braid.scheduling.planner.layer import BackwardCosts, decide_priority
from braid.scheduling.planner.model import LaunchCosts, decide_launch
from braid.scheduling.planner.operation import Overlap, schedule_operation
from braid.scheduling.planner.orders import Bench
from braid.scheduling.planner.partition import Collective
from braid.scheduling.simulate import Simulation
from braid.scheduling.units import chunk_parameters, chunk_parts


def collective_notes(bench: Bench, cluster: ClusterSpec) -> tuple[CollectiveNote, ...]:
    """The operation tier: every collective of the layers' forward passes with the GEMM that depends on it."""
    groups = axis_groups(bench.setting.layout, cluster.gpus_per_node)
    notes = []
    layers = {name: part for name, part in bench.members.items() if is_layer(name)}
    for name, op, gemm in ((n, *pair) for n, part in layers.items() for pair in _with_gemm(part)):
        assert op.axis is not None
        group = groups[op.axis]
        sent = op.bytes
        collective = Collective(
            kind=op.kind, payload_bytes=sent * group.size // (group.size - 1), dims=("tokens",)
        )
        chain = () if gemm is None else (_as_matmul(layers[name], gemm),)
        decision = schedule_operation(
            Overlap(collective=collective, group=group, chain=chain, independent_ns=0), cluster
        )
        notes.append(
            CollectiveNote(
                collective=f"{name}/{op.name}",
                scheme=decision.scheme.describe(),
                ns=decision.ns,
                unpartitioned_ns=decision.unpartitioned_ns,
                runner_up=decision.runner_up.describe(),
                runner_up_ns=decision.runner_up_ns,
            )
        )
    return tuple(notes)


def tier_notes(bench: Bench, simulation: Simulation, cluster: ClusterSpec) -> tuple[TierNote, ...]:
    """The layer tier (equation 1) and, where gradients are shared, the model tier (equation 2)."""
    kinds = dict.fromkeys(bench.setting.model.kinds)
    notes = [_layer_note(bench, kind, f"{kind}: " if len(kinds) > 1 else "") for kind in kinds]
    layout = bench.setting.layout
    if layout.dp * layout.cp > 1 and bench.setting.micro_batches > 1:
        note = _model_note(bench, simulation, cluster)
        if note is not None:
            notes.append(note)
    return tuple(notes)


def _with_gemm(part: Part) -> Iterator[tuple[Operator, Operator | None]]:
    """Collectives that the tier cuts, each with the GEMM that reads (or writes) what it moves."""
    operators = part.forward.operators
    for op in operators:
        if op.kind is Kind.ALL_GATHER:
            readers = (o for o in operators if o.kind is Kind.GEMM and op.writes[0] in o.reads)
            yield op, next(readers, None)
        elif op.kind is Kind.REDUCE_SCATTER:
            yield op, next((o for o in operators if o.kind is Kind.GEMM and op.reads[0] in o.writes), None)


def _as_matmul(part: Part, gemm: Operator) -> ChainOperator:
    rows = _tokens(part)
    outputs = max(1, part.values[gemm.writes[0]].elements // rows)
    inputs = max(1, gemm.flops // (2 * rows * outputs))
    return matmul(
        gemm.name,
        Dim(name="tokens", size=rows, role=Role.OTHER),
        Dim(name="inputs", size=inputs, role=Role.CONTRACTION),
        Dim(name="outputs", size=outputs, role=Role.OTHER),
    )


def _tokens(part: Part) -> int:
    """Rows of the layer's GEMMs: all tokens of the micro-batch on this rank of context parallelism."""
    attention = next(op for op in part.forward.operators if op.kind is Kind.GEMM)
    reads = part.values[attention.reads[0]].elements
    widths = part.values["x"].elements
    local = part.values["attention_norm.statistics"].elements
    return max(1, reads * local // widths)


def _layer_note(bench: Bench, kind: str, which: str) -> TierNote:
    """T1 and T2 over the backward pass of a layer: tensor-parallel collectives, no sharded weights."""
    ns: dict[str, int] = dict.fromkeys(("gather", "scatter", "input", "weight", "others"), 0)
    for op in bench.members[kind].backward.operators:
        cost = bench.profile.solo(op.key)
        match op.kind:
            case Kind.ALL_GATHER:
                ns["gather"] += cost
            case Kind.REDUCE_SCATTER:
                ns["scatter"] += cost
            case _ if op.phase is Pass.WEIGHT_GRADIENT:
                ns["weight"] += cost
            case _ if op.kind in (Kind.GEMM, Kind.GROUPED_GEMM, Kind.ATTENTION):
                ns["input"] += cost
            case _ if not op.kind.communicates:
                ns["others"] += cost
    decision = decide_priority(
        BackwardCosts(
            weight_gather_ns=0,
            activation_gather_ns=ns["gather"],
            activation_gradient_ns=ns["input"],
            weight_gradient_ns=ns["weight"],
            activation_scatter_ns=ns["scatter"],
            weight_scatter_ns=0,
            others_ns=ns["others"],
        )
    )
    other = "weight" if decision.priority.value == "activation" else "activation"
    return TierNote(
        tier="layer",
        decision=f"{which}{decision.priority.value} gradient first",
        ns=decision.ns,
        runner_up=f"{which}{other} gradient first",
        runner_up_ns=decision.runner_up_ns,
    )


def _model_note(bench: Bench, simulation: Simulation, cluster: ClusterSpec) -> TierNote | None:
    setting = bench.setting
    layout = setting.layout
    kinds = setting.model.kinds
    parameters = chunk_parameters(bench.members, layout, kinds, 0).dense
    layers = [bench.members[name] for name, _ in chunk_parts(layout, kinds, 0) if is_layer(name)]
    passes = [layer.forward for layer in layers], [layer.backward for layer in layers]
    forward, backward = (
        sum(bench.profile.solo(op.key) for graph in graphs for op in graph.operators) for graphs in passes
    )
    saved = sum(layer.saved_bytes(2) for layer in layers)
    memory = simulation.memory[0]
    free = cluster.usable_bytes - memory.total_bytes + memory.activation_bytes
    if free < saved:
        return None
    decision = decide_launch(
        LaunchCosts(
            gather_ns=bench.profile.transfer_ns("dp", Kind.ALL_GATHER, parameters * 2),
            scatter_ns=bench.profile.transfer_ns("dp", Kind.REDUCE_SCATTER, parameters * 4),
            forward_ns=forward,
            backward_ns=backward,
            activation_bytes=saved,
            free_bytes=free,
            micro_batches=setting.micro_batches,
            stages=layout.pp,
        )
    )
    chosen, depth = decision.launch, decision.depth_first
    return TierNote(
        tier="model",
        decision=f"L1={chosen.forward} L2={chosen.backward}",
        ns=chosen.exposed_ns,
        runner_up=f"depth-first, L1=L2={depth.forward}",
        runner_up_ns=depth.exposed_ns,
    )
