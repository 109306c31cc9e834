"""The Ray shell around a rank: the only Ray import of the stage."""

import ray

from braid.actors.stage.worker import Worker


@ray.remote(max_restarts=0, max_task_retries=0)
class StageActor(Worker):
    """One rank as an actor; its methods are those of `Worker`."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, ray.util.get_node_ip_address())

    def node(self) -> dict[str, str | int]:
        """Where this rank runs."""
        return {
            "address": self.address,
            "node": ray.get_runtime_context().get_node_id(),
            "process": self.process_id(),
        }
