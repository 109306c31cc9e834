"""DHelix's other figures: table 1 (volumes), section 6.5 (memory), figure 15 (parts of the gain).

Table 1 is a formula over a layer's operators; memory is counted on the lowered schedules; the breakdown
restricts what the pairing may use.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from braid.scheduling.cost.collectives import sent_bytes
from braid.scheduling.generate.lower import Choices
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.cluster import ClusterSpec
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.operators import Graph, Kind, Phase
from braid.scheduling.model.presets.library import cluster_preset, model_preset
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.model.units import chunk_parameters
from braid.scheduling.plan.decide import modelled, replay, simulate_setting
from braid.scheduling.plan.orders import CostedSetting, layer_pair, segment_steps
from braid.scheduling.plan.pairing import pair
from braid.scheduling.plan.space import with_schedule
from braid.scheduling.plan.strands import PairProblem, StrandGraph
from braid.scheduling.schedule.memory import DTYPE_BYTES
from braid.scheduling.schedule.text import parse_sides
from tests.papers.dhelix import BATCH_TOKENS, claim, number, percentages
from tests.papers.rows import FORMULA_TOLERANCE, RATE_TOLERANCE, Row
from tests.papers.steps import chosen_setting
from tests.papers.test_w_memory import largest, model_with

STEP_TOKENS: Final = 16 * 2**20
"""Tokens of a step of Llama-3.1-405B (table 1)."""


def part_rows(progress: Callable[[str], None]) -> Iterator[Row]:
    """Rows of table 1, section 6.5 and figure 15."""
    progress("DHelix: volumes of Llama-3.1-405B")
    yield from _volume_rows(cluster_preset("h100"))
    progress("DHelix: layers that fit")
    yield from _memory_rows(cluster_preset("a40"))
    for cp in (2, 4):
        progress(f"DHelix: parts of the gain, context parallel {cp}")
        yield from _breakdown_rows(cluster_preset("a40"), cp)


# -- table 1 -------------------------------------------------------------------------------------------------


def volumes(model: ModelShape, layout: ParallelLayout, step_tokens: int) -> tuple[float, float]:
    """Bytes that a GPU sends in one step: of tensor parallelism, inside the node; of messages between stages
    and of gradients, in two bytes, between nodes. Micro-batches of one sample, means over stages.

    Gradients are reduced once, those of a rank that holds its share of the layers and of both tables.
    """
    width = DTYPE_BYTES["bf16"]
    samples = step_tokens // model.sequence // layout.dp
    parts = built_in_parts(PartSizes(model, layout, 1))
    layer = parts["layer"]
    operators = (*layer.forward.operators, *layer.backward.operators)
    tensor = sum(op.bytes for op in operators if op.axis == "tp")
    message = sent_bytes(Kind.SEND_RECEIVE, layer.values[layer.output].bytes(width), layout.pp)
    messages = 2 * (layout.pp - 1) / layout.pp * message
    whole = chunk_parameters(parts, ParallelLayout(tp=layout.tp), model.kinds, 0).total
    tables = 2 * -(-model.vocabulary // layout.tp) * model.hidden
    held = (whole - tables) / layout.pp + tables
    gradients = sent_bytes(Kind.REDUCE_SCATTER, held * width, layout.dp)
    return tensor * model.layers / layout.pp * samples, messages * samples + gradients


def _volume_rows(cluster: ClusterSpec) -> Iterator[Row]:
    model = model_preset("llama-405b")
    assert cluster.inter is not None
    levels, links = ("local", "cross"), (cluster.intra, cluster.inter)
    published = (64, ((441.0, 0.98), (8.6, 0.17))), (128, ((220.0, 0.30), (7.7, 0.15)))
    for dp, figures in published:
        layout = ParallelLayout(dp=dp, tp=8, pp=16)
        found = volumes(model, layout, STEP_TOKENS)
        for level, link, sent, (size, seconds) in zip(levels, links, found, figures, strict=True):
            where = f"{layout.ranks} GPUs, {level}-node communication of a GPU and step"
            gib, rate = sent / 2**30, link.bytes_per_s / 1e9
            agree = "printed as GB; it is GiB that agree"
            yield number("table 1", where, "GiB", size, gib, FORMULA_TOLERANCE, agree)
            note = f"the printed size over {rate:.0f} GB/s, the data sheet's rate of a GPU and direction"
            if abs(gib / rate / seconds - 1) > FORMULA_TOLERANCE:
                note += (
                    f"; {seconds} s would need {gib / seconds:.0f} GB/s, though half the size at the other "
                    f"row's rate is {gib / rate:.2f} s"
                )
            yield number("table 1", where, "s", seconds, gib / rate, FORMULA_TOLERANCE, note)


# -- section 6.5 ---------------------------------------------------------------------------------------------


def _memory_rows(cluster: ClusterSpec) -> Iterator[Row]:
    published = {"megatron": 40.0, "dhelix": 39.0}
    most = {schedule: largest(schedule, tables=True) for schedule in published}
    billions = {s: model_with(layers, tables=True).parameters() / 1e9 for s, layers in most.items()}
    share, found = (100 * of["dhelix"] / of["megatron"] for of in (published, billions))
    note = f"{most['dhelix']} and {most['megatron']} layers of Llama-25B on A40, dp 4 x tp 8 x pp 2"
    what = "largest model that fits, dhelix of a single strand's"
    yield percentages("section 6.5", what, share, [found], note)
    for schedule, size in published.items():
        what = f"largest model that fits, {'single strand' if schedule == 'megatron' else schedule}"
        note = f"{most[schedule]} layers; {cluster.usable_bytes / 2**30:.1f} GiB of a GPU are usable"
        yield number("section 6.5", what, "B parameters", size, billions[schedule], RATE_TOLERANCE, note)


# -- figure 15 -----------------------------------------------------------------------------------------------

COMPUTE, LOCAL, CROSS = range(3)
"""Streams by their number in a `PairProblem`."""


class Part(NamedTuple):
    """A step of the breakdown: which streams may gain by running together, and what may move."""

    name: str
    together: frozenset[tuple[int, int]]
    movable: bool = False


_TP = frozenset({(COMPUTE, LOCAL)})
_CP = _TP | {(COMPUTE, CROSS)}
_LINKS = _CP | {(LOCAL, CROSS)}
PARTS: Final = (
    Part("TP overlap", _TP),
    Part("CP overlap", _CP),
    Part("local beside cross-node", _LINKS),
    Part("movable weight gradients", _LINKS, movable=True),
)


def restricted(problem: PairProblem, backward: Graph, part: Part) -> PairProblem:
    """The problem with only a part's means.

    Streams that may not overlap lose by running together. Where weight gradients may not move,
    they keep their place among the compute operators.
    """
    streams = np.array((*problem.forward.streams, *problem.backward.streams))
    low, high = np.minimum.outer(streams, streams), np.maximum.outer(streams, streams)
    allowed = low == high
    for a, b in part.together:
        allowed |= (low == a) & (high == b)
    graph = problem.backward if part.movable else _in_place(problem.backward, backward)
    return replace(problem, slowdown=np.where(allowed, problem.slowdown, 2.0), backward=graph)


def _in_place(graph: StrandGraph, backward: Graph) -> StrandGraph:
    """With precedence between every weight gradient and the compute operators beside it."""
    before = list(graph.before)
    computes = [n for n, stream in enumerate(graph.streams) if stream == COMPUTE]
    for first, second in pairwise(computes):
        phases = {backward.operators[n].phase for n in (first, second)}
        if Phase.WEIGHT_GRADIENT in phases:
            before[second] |= 1 << first
    return replace(graph, before=tuple(before))


def breakdown(setting: Setting, cluster: ClusterSpec) -> tuple[float, ...]:
    """Percent over Megatron-LM after each of `PARTS`; their pairings, simulated with all contention."""
    base = simulate_setting(with_schedule(setting, "megatron"), cluster).numbers.step_seconds
    bench = modelled(cluster)(with_schedule(setting, "dhelix"))
    return tuple(100 * (base / _with_part(bench, part, cluster) - 1) for part in PARTS)


def _with_part(bench: CostedSetting, part: Part, cluster: ClusterSpec) -> float:
    problem = restricted(layer_pair(bench), bench.members["layer"].backward, part)
    choices = Choices(orders={parse_sides("F:layer|B:layer"): segment_steps(problem, pair(problem))})
    return replay(bench.setting, choices, cluster).numbers.step_seconds


def _breakdown_rows(cluster: ClusterSpec, cp: int) -> Iterator[Row]:
    """Figure 15. The paper does not say whether keys and values are exchanged once per group of query heads,
    or once per head, as attention without grouped heads wants them. Its order of the parts tells: with 8 of
    128 heads a ring step moves so little that CP overlap comes to 2 to 7 %, far behind TP overlap.
    """
    sequence = 8192 * cp
    grouped = model_preset("llama-39b")
    model = replace(grouped, sequence=sequence, kv_heads=grouped.heads)
    setting = chosen_setting([model], cluster, global_batch=BATCH_TOKENS // sequence, cp=cp)
    problem = layer_pair(modelled(cluster)(setting))
    gains = breakdown(setting, cluster)
    steps = [gains[0], *(b - a for a, b in pairwise(gains))]
    listed = ", ".join(f"{part.name} {step:+.1f}" for part, step in zip(PARTS, steps, strict=True))
    figure, where = f"figure 15{'ab'[cp // 4]}", f"Llama-39B, context parallel {cp}"
    described = f"{setting.layout.describe()}; percent over Megatron-LM: {listed}"
    adding = sum(step > 0 for step in steps)
    what = f"{where}: each part adds to those before it (parts that do, of {len(PARTS)})"
    yield claim(figure, what, "parts", float(adding), adding == len(PARTS), described)
    largest = max(range(len(PARTS)), key=steps.__getitem__)
    note = (
        f"largest: {PARTS[largest].name}. Cross-node collectives take "
        f"{_stream_share(problem, CROSS):.0%} of a layer's serial time, those of the node "
        f"{_stream_share(problem, LOCAL):.0%}; keys and values of all heads are exchanged"
    )
    yield claim(
        figure, f"{where}: CP overlap is the largest part (its gain)", "%", steps[1], largest == 1, note
    )


def _stream_share(problem: PairProblem, stream: int) -> float:
    """Share of the serial time that the operators of a stream take."""
    both = [(graph.streams, graph.solo_ns) for graph in (problem.forward, problem.backward)]
    return sum(ns for own in both for s, ns in zip(*own, strict=True) if s == stream) / problem.serial_ns
