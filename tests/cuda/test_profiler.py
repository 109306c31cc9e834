"""The profiler on a device with a clock: it measures what the device takes, not what its host does."""

from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from braid.actors.stage.measure import profiling
from braid.actors.stage.measure.profiling import Profiler
from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.model.model import StageModel
from braid.actors.stage.rank.groups import build_mesh
from braid.actors.stage.rank.messages import Samples
from braid.actors.stage.run.cuda_streams import CudaStreams
from braid.actors.stage.state.buckets import RankBuckets
from braid.kernels.operators.embedding import VocabularyShard
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.operators import Operator
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import PartSizes
from tests.cuda.clock import TimedDevice, group_ns
from tests.cuda.machine import ModelGroups

LAYOUT = ParallelLayout(tp=2)
SHAPE = ModelShape(
    family="llama", hidden=32, layers=1, heads=4, kv_heads=2, head_dim=8, ffn=64, vocabulary=64, sequence=16
)
NEAR = pytest.approx
"""Events count in nanoseconds of single milliseconds."""


Measured = tuple[Samples, dict[str, float]]


@pytest.fixture(scope="module")
def measured() -> Measured:
    """On a device as it is."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return profiled(monkeypatch, TimedDevice())


def profiled(monkeypatch: pytest.MonkeyPatch, device: TimedDevice) -> Measured:
    """What the first of two ranks measures, and what the device took for every operator at most: for those
    that also run on a piece, the whole."""
    sizes = PartSizes(SHAPE, LAYOUT, 2)
    took: dict[str, list[float]] = defaultdict(list)
    method_of = profiling.method_of

    def watched(operator: Operator, instance: Any) -> Callable[..., Any]:
        call = method_of(operator, instance)

        def run(*arguments: Any) -> Any:
            first = len(device.kernels)
            results = call(*arguments)
            took[operator.key].append(sum(device.kernels[first:]))
            return results

        return run

    with device:
        mesh = build_mesh(LAYOUT, 0, timeout=timedelta(seconds=60), groups=ModelGroups(device, device))
        model = StageModel(
            shape=SHAPE,
            layout=LAYOUT,
            place=mesh.place,
            sizes=sizes,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        model.initialise(0)
        streams = CudaStreams(device)
        RankBuckets(model.parameters, mesh, streams, Recorder(streams, recording=False))
        monkeypatch.setattr(profiling, "_WARMING", 192)  # this device computes as slowly as a CPU
        monkeypatch.setattr(profiling, "method_of", watched)
        monkeypatch.setattr(VocabularyShard, "_check", lambda self, tokens: None)  # on CPU alone
        profiler = Profiler(built_in_parts(sizes), model, mesh, streams)
        samples = profiler.run(6, lambda: torch.ones(1000).square().sum(), lambda: torch.ones(1000))
    return samples, {key: max(times[2:]) for key, times in took.items()}  # the first ones make tables


def test_operators_take_what_the_device_takes(measured: Measured) -> None:
    """Though the host takes longer to issue them than the device to run them."""
    samples, took = measured
    compute = {key for key in samples.solo_ns if key in took}
    assert len(compute) > 15
    for key in compute:
        assert samples.solo_ns[key] == NEAR([took[key]] * 6, abs=2), key
    for key, name in samples.spare_of.items():
        expected = group_ns(int(name.split()[1]) * (2 if "gather" in name else 1))
        assert samples.solo_ns[key] == NEAR([expected] * 6, abs=2), key
        assert samples.spares[name] == NEAR([expected] * 6, abs=2)
    for before, after in (one for times in samples.handling.values() for one in times):
        assert before == NEAR(0, abs=2), "the host is ahead: issuing costs compute nothing"
        assert after == NEAR(0, abs=2)


def test_nothing_slows_down_where_nothing_is_shared(measured: Measured) -> None:
    """Beside a transfer operators take what they take alone; they overlap with it."""
    samples, took = measured
    beside = {name for _, name in samples.together}
    assert len(beside) > 2
    delays = []
    for (key, name), times in samples.together.items():
        alone = took[key]
        for one in times:
            assert one.operator_ns == NEAR(alone, abs=2), (key, name)
            assert one.other_ns == NEAR(samples.spares[name][0], abs=2)
            assert one.both_ns == NEAR(max(one.delay_ns + alone, one.other_ns), abs=2)
            delays.append(one.delay_ns)
    assert max(delays) > 1_000, "operators begin at any time meanwhile"
