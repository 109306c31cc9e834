"""DHelix's measurements beside simulated steps on modelled clusters (sections 6.2 and 6.3, figure 3).

Every constant belongs to a GPU or a link (``presets/clusters.yaml``). Where the paper leaves a layout out of
its text (figure 11 shows it in the picture only), `chosen_setting` says by which rule it is chosen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from braid.scheduling.mesh.cluster import ClusterSpec
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.presets.library import cluster_preset, model_preset
from tests.papers import rows
from tests.papers.rows import RATE_TOLERANCE, Figure, Row
from tests.papers.steps import BASELINES, OURS, Steps, axis_share, chosen_setting, setting_of, steps

percentages, number, claim = (partial(make, "DHelix") for make in (rows.percentages, rows.number, rows.claim))
BATCH_TOKENS: Final = 8 * 2**20
"""Tokens of a step of Llama and GPT (section 6.2)."""
PHI_BATCH: Final = 1600
"""Samples of a step of Phi (section 6.2)."""
FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "Llama": ("llama-8b", "llama-25b", "llama-39b"),
    "GPT": ("gpt-6.7b", "gpt-18b", "gpt-30b"),
}
OVER_DENSE: Final[Mapping[str, Mapping[str, Figure]]] = {
    "Llama": {"megatron": (27, 40), "intra_batch": (15, 28), "wavelet": (21, 25)},
    "GPT": {"megatron": (26, 40), "intra_batch": (15, 33), "wavelet": (12, 25)},
}
BASELINES_OVER_MEGATRON: Final[Mapping[str, Figure]] = {"intra_batch": (5, 15), "wavelet": (6, 16)}
HIDDEN: Final = {"intra_batch": 26.1, "wavelet": 39.9, "dhelix": 83.0}
OVER_LONG: Final[Mapping[str, Figure]] = {"megatron": (22, 39), "intra_batch": (13, 30), "wavelet": (11, 30)}


def dense_steps(cluster: ClusterSpec, *, sequence: int, cp: int) -> dict[str, list[Steps]]:
    """The dense models of figures 11 and 12, by family; models of one size have one layout."""
    found: dict[str, list[Steps]] = {}
    for names in zip(*FAMILIES.values(), strict=True):
        models = [replace(model_preset(name), sequence=sequence) for name in names]
        for family, name, model in zip(FAMILIES, names, models, strict=True):
            of_one_size = [model, *(other for other in models if other is not model)]
            setting = chosen_setting(of_one_size, cluster, global_batch=BATCH_TOKENS // sequence, cp=cp)
            found.setdefault(family, []).append(steps(name, setting, cluster))
    return found


def dhelix_rows(progress: Callable[[str], None]) -> Iterator[Row]:
    """All measured figures of the paper's evaluation."""
    a40, a800 = cluster_preset("a40"), cluster_preset("a800")
    progress("DHelix: dense models on A40, sequence 8192")
    dense = dense_steps(a40, sequence=8192, cp=1)
    yield from _dense_rows(dense)
    progress("DHelix: dense models on A40, sequence 16384, context parallel 2")
    long = dense_steps(a40, sequence=16384, cp=2)
    yield from _long_rows([run for runs in long.values() for run in runs])
    progress("DHelix: mixture of experts on A40 and A800")
    phi = {name: _phi_steps(name, cluster) for name, cluster in (("phi-31b", a40), ("phi-42b", a800))}
    yield from _phi_rows(phi)
    progress("DHelix: Llama-66B on A800")
    large = {cp: _llama_66b(a800, cp) for cp in (2, 4)}
    yield from _a800_rows(large)
    llama_39b = long["Llama"][2]
    yield from _share_rows(llama_39b, long["Llama"][1], phi["phi-31b"], large[2])
    yield _bubble_row([*(run for runs in (*dense.values(), *long.values()) for run in runs), *phi.values()])


# -- A40, figures 11 and 12 ----------------------------------------------------------------------------------


def _dense_rows(dense: Mapping[str, Sequence[Steps]]) -> Iterator[Row]:
    figure = "figure 11"
    for family, runs in dense.items():
        for over, published in OVER_DENSE[family].items():
            what = f"{family}: DHelix over {BASELINES[over]}"
            yield _gain_row(figure, what, runs, "dhelix", over, published)
        yield from our_rows(figure, f"{family}, sequence 8192", runs)
    every = [run for runs in dense.values() for run in runs]
    for schedule, published in BASELINES_OVER_MEGATRON.items():
        what = f"Llama and GPT: {BASELINES[schedule]} over Megatron-LM"
        yield _gain_row("section 6.2.1", what, every, schedule, "megatron", published)
    for schedule, percent in HIDDEN.items():
        values = [run.hidden(schedule) for run in every]
        what = f"communication that {BASELINES.get(schedule, 'DHelix')} hides, mean of the six models"
        note = f"{min(values):.0f} to {max(values):.0f} %; {_HIDDEN_NOTES[schedule]}"
        yield percentages("section 6.2.1", what, percent, [sum(values) / len(values)], note)


_HIDDEN_NOTES: Final = {
    "intra_batch": "pieces of a collective flow beside pieces of its GEMM without any loss but the smaller "
    "GEMMs' own; kernels of a real split wait for each other more",
    "wavelet": "strands take turns operator by operator",
    "dhelix": "the best pairing of segments between barriers",
}


def _long_rows(runs: Sequence[Steps]) -> Iterator[Row]:
    figure = "figure 12"
    for over, published in OVER_LONG.items():
        what = f"Llama and GPT, context parallel 2: DHelix over {BASELINES[over]}"
        yield _gain_row(figure, what, runs, "dhelix", over, published)
    yield from our_rows(figure, "Llama and GPT, context parallel 2", runs)


def _gain_row(
    figure: str, what: str, runs: Sequence[Steps], schedule: str, over: str, published: Figure
) -> Row:
    gains = [run.gain(schedule, over) for run in runs]
    listed = (
        f"{run.described} {gain:+.0f} % (communication {run.communication:.0%})"
        for run, gain in zip(runs, gains, strict=True)
    )
    return percentages(figure, what, published, gains, "; ".join(listed))


def our_rows(figure: str, what: str, runs: Sequence[Steps]) -> Iterator[Row]:
    """Our schedules beside DHelix's: never slower."""
    for schedule in OURS:
        there = [run for run in runs if schedule in run.outcomes]
        if not there:
            continue
        gains = [run.gain(schedule, "dhelix") for run in there]
        over = [run.gain(schedule) for run in there]
        about = f"{what}: {schedule} over DHelix (not slower)"
        note = f"over Megatron-LM {min(over):+.1f} to {max(over):+.1f} %"
        yield claim(figure, about, "%", (min(gains), max(gains)), min(gains) >= -1e-6, note)


# -- mixture of experts --------------------------------------------------------------------------------------


def _phi_steps(name: str, cluster: ClusterSpec) -> Steps:
    layout = ParallelLayout(dp=16, pp=4, ep=8)
    setting = setting_of(model_preset(name), layout, PHI_BATCH, 1)
    assert setting is not None
    return steps(name, setting, cluster, ("megatron", "wavelet"))


def _phi_note(run: Steps, schedule: str) -> str:
    before, after = (run.outcomes[name].numbers.bubble_fraction for name in ("megatron", schedule))
    note = (
        f"{run.described}; EP takes {axis_share(run, ('ep',)):.0f} % of Megatron-LM's step, with balanced "
        f"routing; bubble {before:.0%} with 1F1B, {after:.0%} folded"
    )
    if after > before + 0.02:
        note += (
            ": embedding and head share stage 0, for which the others wait, and activations, whole without "
            "tensor parallelism, cross the network between stages twice as often"
        )
    return note


def _phi_rows(phi: Mapping[str, Steps]) -> Iterator[Row]:
    published: tuple[tuple[str, str, str, Figure], ...] = (
        ("phi-31b", "table 6", "wavelet", (4, 5)),
        ("phi-31b", "table 6", "dhelix", (26, 27)),
        ("phi-42b", "section 6.3.2", "wavelet", 4),
        ("phi-42b", "section 6.3.2", "dhelix", 15),
    )
    for name, figure, schedule, percent in published:
        run = phi[name]
        what = f"{name} on {run.cluster.gpu.name}: {BASELINES.get(schedule, 'DHelix')} over Megatron-LM"
        yield percentages(figure, what, percent, [run.gain(schedule)], _phi_note(run, schedule))
    run = phi["phi-31b"]
    note = "for information: the router's imbalance (up to capacity 6) is not published; balanced here"
    for schedule, rate in {"megatron": 59941.0, "wavelet": 62454.0, "dhelix": 75386.0}.items():
        simulated = run.outcomes[schedule].numbers.tokens_per_second
        what = f"phi-31b: {BASELINES.get(schedule, 'DHelix')}"
        row = number("table 6", what, "tokens/s", rate, simulated, RATE_TOLERANCE, note)
        yield replace(row, fits=None)
    for name, run in phi.items():
        yield from our_rows("table 6" if name == "phi-31b" else "section 6.3.2", name, [run])


# -- A800 ----------------------------------------------------------------------------------------------------


def _llama_66b(cluster: ClusterSpec, cp: int) -> Steps:
    sequence = 8192 * cp
    model = replace(model_preset("llama-66b"), sequence=sequence)
    setting = chosen_setting([model], cluster, global_batch=BATCH_TOKENS // sequence, cp=cp)
    return steps(f"llama-66b, cp {cp}", setting, cluster, ("megatron", "wavelet"))


def _a800_rows(large: Mapping[int, Steps]) -> Iterator[Row]:
    for schedule, cp, tflops in (("megatron", 2, 186.0), ("megatron", 4, 160.9), ("dhelix", 4, 199.7)):
        run = large[cp]
        what = f"Llama-66B on A800, context parallel {cp}: {BASELINES.get(schedule, 'DHelix')}"
        note = f"{run.described}; causal attention counted once; {_memory_note(run, schedule)}"
        yield number("figure 13a", what, "TFLOP/s", tflops, run.tflops(schedule), RATE_TOLERANCE, note)
    runs = list(large.values())
    for over, published in (("megatron", (7.0, 24.0)), ("wavelet", (5.0, 14.0))):
        what = f"Llama-66B on A800: DHelix over {BASELINES[over]}"
        yield _gain_row("section 6.3.1", what, runs, "dhelix", over, published)
    yield _gain_row("abstract", "A800: DHelix over Megatron-LM", runs, "dhelix", "megatron", (2.0, 29.0))
    yield from our_rows("figure 13a", "Llama-66B on A800", runs)


def _memory_note(run: Steps, schedule: str) -> str:
    over = run.outcomes[schedule].numbers.peak_bytes - run.cluster.usable_bytes
    return "fits the GPU" if over <= 0 else f"needs {over / 2**30:.1f} GiB more than we let a plan use"


# -- shares of time ------------------------------------------------------------------------------------------


def _share_rows(llama_39b: Steps, llama_25b: Steps, phi: Steps, a800: Steps) -> Iterator[Row]:
    cases = (
        ("figure 3", llama_39b, ("tp", "cp"), 55.0, "TP and CP on A40", _SHARE_39B),
        ("figure 3", phi, ("ep",), 34.3, "EP on A40", _SHARE_EP),
        ("section 6.3.1", a800, ("tp",), 10.0, "TP on A800", _SHARE_A800),
        ("section 6.3.1", llama_25b, ("tp",), 29.0, "TP on A40", "the layers of Llama-66B; taken of 25B"),
    )
    for figure, run, axes, percent, what, note in cases:
        about = f"{run.name}: share of Megatron-LM's time in {what}"
        yield percentages(figure, about, percent, [axis_share(run, axes)], f"{run.described}; {note}")


_SHARE_39B: Final = (
    "GEMMs grow with the square of the hidden size, messages with the size itself: 39B must have a smaller "
    "share than 25B's width on the same links, where the paper prints 29 %; one bandwidth cannot give both"
)
_SHARE_EP: Final = (
    "balanced routing; experts of one node's GPUs, so that no all-to-all leaves the node. Messages between "
    "stages and gradients bring all communication to about the printed share"
)
_SHARE_A800: Final = (
    "at 160 of NVLink's 200 GB/s; Megatron-LM hides a part of it behind weight gradients, which the paper's "
    "share may leave out"
)


def _bubble_row(runs: Sequence[Steps]) -> Row:
    piped = [run for run in runs if run.setting.layout.pp > 1]
    bubbles = (
        [run.outcomes[name].numbers.bubble_fraction for name in ("dhelix", "megatron")] for run in piped
    )
    points = [100 * (ours - serial) for ours, serial in bubbles]
    listed = ", ".join(f"{run.name} {value:+.1f}" for run, value in zip(piped, points, strict=True))
    note = f"{listed}; the same W with less time in the blocks, and embedding and head on one stage"
    return percentages("section 4.1", "bubble of DHelix less that of 1F1B (unchanged)", 0.0, points, note)
