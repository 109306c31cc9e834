"""One step under several schedules, and the layout that it has where a paper does not print one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.cluster import ClusterSpec
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.shape import ModelShape, Workload
from braid.scheduling.plan.decide import Outcome, simulate_setting
from braid.scheduling.plan.space import with_schedule

OURS: Final = ("braid:w", "braid:v")
"""Pipelines of ours, each by itself: the W is DHelix's."""
BASELINES: Final[Mapping[str, str]] = {
    "megatron": "Megatron-LM",
    "intra_batch": "Intra-batch",
    "wavelet": "Wavelet+",
}
DEGREES: Final = (*((tp, 1) for tp in (1, 2, 4, 8)), *((8, pp) for pp in (2, 4, 8)))
"""(TP, PP) from the smallest on: tensor parallelism first, as far as a node goes."""


@dataclass(frozen=True)
class Steps:
    name: str
    setting: Setting
    cluster: ClusterSpec
    outcomes: Mapping[str, Outcome]

    def gain(self, schedule: str, over: str = "megatron") -> float:
        """Throughput of a schedule over another's, in percent more."""
        return 100 * (self.seconds(over) / self.seconds(schedule) - 1)

    def seconds(self, schedule: str) -> float:
        return self.outcomes[schedule].numbers.step_seconds

    @property
    def communication(self) -> float:
        """Share of Megatron-LM's step."""
        return self.outcomes["megatron"].numbers.communication_seconds / self.seconds("megatron")

    def hidden(self, schedule: str) -> float:
        """Percent of the communication that compute hides."""
        return 100 * self.outcomes[schedule].numbers.hidden_fraction

    def tflops(self, schedule: str) -> float:
        """Model TFLOP/s of a GPU."""
        mfu = self.outcomes[schedule].numbers.mfu
        assert mfu is not None
        return mfu * self.cluster.gpu.peak_flops_per_s / 1e12

    @cached_property
    def described(self) -> str:
        """Model, layout and micro-batch in a few words."""
        return f"{self.name}: {self.setting.layout.describe()}, {self.setting.workload.micro_batch} a time"


def steps(
    name: str, setting: Setting, cluster: ClusterSpec, schedules: Sequence[str] = tuple(BASELINES)
) -> Steps:
    """Simulate a setting under the baselines, DHelix and ours; ours only where they exist."""
    outcomes = {
        schedule: simulate_setting(with_schedule(setting, schedule), cluster)
        for schedule in (*schedules, "dhelix")
    }
    for schedule in OURS:
        try:
            outcomes[schedule] = simulate_setting(with_schedule(setting, schedule), cluster)
        except ValueError:
            continue  # v wants at least two micro-batches a stage
    return Steps(name, setting, cluster, outcomes)


def chosen_setting(
    models: Sequence[ModelShape], cluster: ClusterSpec, *, global_batch: int, cp: int = 1
) -> Setting:
    """The first model's setting: the smallest TP x PP that fits all of ``models`` with a micro-batch of 1,
    then the largest micro-batch that fits.

    ``models`` are of one size, as group sizes are scaled with the size (section 6.2.1). Fitting is judged on
    the baseline, Megatron-LM with ZeRO 1. Where nothing fits, the layout that needs the least memory.
    """
    needs: list[tuple[int, Setting]] = []
    for tp, pp in DEGREES:
        if cluster.gpus % (tp * pp * cp):
            continue
        layout = ParallelLayout(dp=cluster.gpus // (tp * pp * cp), tp=tp, pp=pp, cp=cp)
        settings = [s for model in models if (s := setting_of(model, layout, global_batch, 1)) is not None]
        if len(settings) < len(models):
            continue
        needs.append((max(_peak_bytes(setting, cluster) for setting in settings), settings[0]))
        if needs[-1][0] <= cluster.usable_bytes:
            return largest_micro_batch(settings[0], cluster)
    return min(needs, key=lambda need: need[0])[1]


def largest_micro_batch(setting: Setting, cluster: ClusterSpec) -> Setting:
    """The setting with the largest micro-batch that fits, doubled as often as it can be."""
    workload = setting.workload
    larger = setting_of(setting.model, setting.layout, workload.global_batch, 2 * workload.micro_batch)
    if larger is None or _peak_bytes(larger, cluster) > cluster.usable_bytes:
        return setting
    return largest_micro_batch(larger, cluster)


def setting_of(model: ModelShape, layout: ParallelLayout, batch: int, micro_batch: int) -> Setting | None:
    """None where the batch or the model cannot be cut that way."""
    try:
        return Setting(
            model=model,
            layout=replace(layout, zero=int(layout.dp * layout.cp > 1)),
            workload=Workload(global_batch=batch, micro_batch=micro_batch),
            context="ring" if layout.cp > 1 else "all_gather",
        )
    except ValueError:
        return None


def _peak_bytes(setting: Setting, cluster: ClusterSpec) -> int:
    return simulate_setting(setting, cluster).numbers.peak_bytes


def axis_share(run: Steps, axes: Sequence[str]) -> float:
    """Percent of the serial step that the layers' collectives over some axes take, mean over the stages."""
    bench = run.outcomes["megatron"].bench
    layer, setting = bench.members["layer"], bench.setting
    ns = sum(
        bench.profile.solo(op.key)
        for op in (*layer.forward.operators, *layer.backward.operators)
        if op.axis in axes
    )
    layers = setting.model.layers / setting.layout.pp
    return 100 * ns * layers * setting.micro_batches / 1e9 / run.seconds("megatron")
