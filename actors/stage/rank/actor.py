"""The Ray actor around a rank, the only module of the stage that imports Ray."""

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from braid.actors.stage.measure.span_stream import Sink
from braid.actors.stage.rank.worker import Worker

_UNDER_WAY = 8
"""Greatest number of batches of spans that may be on their way to the collector."""


BESIDE = "beside"
"""The concurrency group of calls that are answered while another method runs: `pulse` and `interrupt`."""


class StageActor(Worker):
    """One rank as an actor, with the methods of `Worker`."""

    def __init__(self, rank: int, inherited: Mapping[str, str]) -> None:
        """Start the rank; ``inherited``: environment variables of the run's command, set here since Ray would
        show them as a runtime environment."""
        os.environ.update(inherited)
        super().__init__(rank, ray.util.get_node_ip_address())

    def _span_sink(self, target: Any) -> Sink:
        return ActorSink(target)

    def node(self) -> dict[str, Any]:
        """Return address, node, process and GPUs of this rank."""
        return {
            "address": self.address,
            "node": ray.get_runtime_context().get_node_id(),
            "process": self.process_id(),
            "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
        }

    def number_as(self, rank: int) -> None:
        """Set the number of this rank; must precede all other calls."""
        self.rank = rank


def start_stage(rank: int, options: dict[str, Any], inherited: Mapping[str, str]) -> Any:
    """Start a rank's actor, with Ray's options; return its handle."""
    settings: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {BESIDE: 1}}
    remote: Any = ray.remote(**settings)
    return remote(StageActor).options(**options).remote(rank, dict(inherited))


class ActorSink:
    """Pushes batches of spans to the collector's actor, a few at a time."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector
        self._under_way: list[Any] = []

    def send(self, batch: bytes) -> bool:
        """Push a batch; return False if too many are on their way, raise `OSError` if nobody takes any."""
        if len(self._under_way) >= _UNDER_WAY:
            done, self._under_way = ray.wait(self._under_way, num_returns=_UNDER_WAY, timeout=0)
            try:
                ray.get(done)
            except RayError as error:
                raise OSError(f"the collector of spans is gone: {error}") from None
            if len(self._under_way) >= _UNDER_WAY:
                return False
        self._under_way.append(self._collector.take.remote(batch))
        return True

    def close(self, timeout_s: float) -> None:
        """Wait until all pushed batches have arrived, for ``timeout_s`` seconds at most."""
        if self._under_way:
            with contextlib.suppress(RayError):
                ray.wait(self._under_way, num_returns=len(self._under_way), timeout=timeout_s)
