"""What the executor itself takes: a step of a rank whose operators and collectives do nothing.

Each operator computes once and from then on returns what it returned first; what is left is the loop,
registers, marks and labels. Run it in two checkouts, alternating, and compare (processor time of a step, the
median of seven):

    PYTHONPATH=$PWD python -m tests.measure.empty_operators
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import braid.actors.stage.bindings as bindings
from braid.actors.stage.executor import Executor, MicroBatch
from braid.actors.stage.gloo_streams import HostStreams
from braid.actors.stage.gradients import GradientBuckets
from braid.actors.stage.streams import Transfer
from braid.actors.stage.telemetry import Recorder
from braid.kernels.collectives.primitives import Launch
from braid.scheduling.operators import Stream
from tests.no_update import NoUpdate
from tests.scheduling.cases import LLAMA, TOKENS, code_of, layout_for, named_schedule
from tests.scheduling.test_memory import mesh_of, stage_model

MICRO_BATCHES = 16
CASES = (("megatron", 1), ("wavelet", 1), ("megatron", 2), ("wavelet", 2))


class NoStreams(HostStreams):
    """Marks cost nothing, transfers are done when they start."""

    def mark(self) -> int:
        self._marks += 1
        return 0

    def start(self, stream: Stream, launch: Launch, *, awaited_next: bool, lane: str = "") -> Transfer:
        self._marks += 1
        return Transfer(launch=launch, work=None, begin=0)

    def wait(self, transfer: Transfer) -> None:
        transfer.end = 0

    def barrier(self) -> None:
        pass


def remembering(method_of: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """Methods that compute once."""

    def found(*arguments: Any) -> Callable[..., Any]:
        method, known = method_of(*arguments), dict[int, Any]()
        return lambda *values: known[0] if known else known.setdefault(0, method(*values))

    return found


@torch.no_grad()
def step_ms(name: str, tp: int) -> float:
    """Milliseconds of processor time that a step takes."""
    layout = layout_for(name, 1, tp)
    shape = replace(LLAMA, layers=8, vocabulary=96)
    code = code_of(named_schedule(name, 1, MICRO_BATCHES, tp), layout)
    with mesh_of(layout, 0) as mesh:
        model = stage_model(replace(shape, layers=len(code.kinds)), layout, 0)
        model.initialise(0)
        streams = NoStreams()
        recorder = Recorder(streams)
        GradientBuckets(model.parameters, mesh, streams, recorder, 1 << 20)
        executor = Executor(code=code, model=model, mesh=mesh, streams=streams, recorder=recorder)
        tokens = torch.zeros(TOKENS, dtype=torch.int64)
        batches = [MicroBatch(tokens, tokens)] * MICRO_BATCHES
        times = []
        for _ in range(9):
            begin = time.process_time()
            executor.run(batches, 1.0, NoUpdate())
            times.append(time.process_time() - begin)
    return statistics.median(times[2:]) * 1e3


if __name__ == "__main__":
    bindings.method_of = remembering(bindings.method_of)
    for name, tp in CASES:
        print(f"{name} tp {tp}: {step_ms(name, tp):.2f} ms a step", flush=True)
