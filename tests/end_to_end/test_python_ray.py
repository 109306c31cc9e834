"""`braid.train` where Ray has been joined: in a script, a task, a trial of Ray Tune. A run uses that cluster,
leaves it running, and leaves nothing on it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import braid
from braid.actors.config import ConfigError
from braid.actors.controller.ranks.group import NoRoomError
from braid.jobs.cluster.session import WORKERS, environment, own_token, session_folder
from tests.end_to_end.command import BASE, losses_of
from tests.end_to_end.test_python import content as mapping
from tests.end_to_end.test_python import examples
from tests.waiting import alive, within

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.own_process, pytest.mark.timeout(600)]
CPUS = 3
MANY = 500


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster that this process has started, in a folder of its own, on ports that are free."""
    with session_folder() as folder, environment(WORKERS), own_token(folder):
        ray.init(
            address="local",
            num_cpus=CPUS,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=f"{folder}/ray",
        )
        yield
        ray.shutdown()


def content(folder: Path, **more: Any) -> dict[str, Any]:
    """A run of four steps with two ranks on the cluster, as a mapping."""
    return {**mapping(folder), "cluster": {"cpus_per_rank": 0.5}, **more}


def many_steps(folder: Path) -> dict[str, Any]:
    """A run that its callbacks stop: on Ray it goes on while they work."""
    return content(folder, train={**BASE["train"], "steps": MANY})


def check_nothing_left(*runs: Path) -> None:
    """The cluster goes on, and neither processes nor places of the runs are on it."""
    assert ray.is_initialized()
    assert within(60, lambda: ray.available_resources().get("CPU") == CPUS), ray.available_resources()
    assert {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"}
    for run in runs:
        cluster = json.loads((run / "cluster.json").read_text())
        assert cluster["launcher"] == "ray"
        processes = [rank["process"] for rank in cluster["ranks"]]
        assert within(30, lambda processes=processes: not any(map(alive, processes)))


class Raises:
    """A callback that raises in the second step."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.told: list[BaseException] = []

    def on_step(self, record: braid.StepRecord) -> None:
        if record.step == 2:
            raise self.error

    def on_failure(self, error: BaseException) -> None:
        self.told.append(error)


@pytest.mark.parametrize(
    "error",
    [KeyError("a mistake"), pytest.param(KeyboardInterrupt(), marks=pytest.mark.thorough)],
    ids=["error", "interrupt"],
)
def test_a_callback_that_raises(tmp_path: Path, error: BaseException) -> None:
    """An interrupt waits for no checkpoint, as a second Ctrl-C."""
    callback = Raises(error)
    with pytest.raises(type(error)) as caught:
        braid.train(many_steps(tmp_path), callbacks=[callback])
    assert callback.told == [caught.value]
    run = tmp_path / "runs" / "run"
    check_nothing_left(run)
    steps = len(losses_of(tmp_path, "run"))
    assert 2 <= steps < MANY
    if isinstance(error, KeyError):
        assert braid.load_run(run).checkpoints().index.tolist() == [steps]
    again = braid.train(many_steps(tmp_path), resume="if-begun", until=steps + 2)
    assert again.steps == steps + 2, "nobody holds the directory"


def test_in_a_task(tmp_path: Path) -> None:
    @ray.remote(num_cpus=1)
    def task(config: dict[str, Any]) -> float | None:
        return braid.train(config).loss

    assert ray.get(task.remote(content(tmp_path))) == losses_of(tmp_path, "run")[-1]
    check_nothing_left(tmp_path / "runs" / "run")
    assert braid.train({**mapping(tmp_path), "name": "alone"}).complete
    assert losses_of(tmp_path, "run") == losses_of(tmp_path, "alone"), "to the last bit"


@pytest.mark.parametrize(
    "stops", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["to-the-end", "stopped"]
)
def test_the_example_of_ray_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool) -> None:
    """Also if Ray Tune stops its trials after their first report."""
    pytest.importorskip("ray.tune")
    monkeypatch.chdir(tmp_path)
    blocks = examples()
    setting = blocks[0].split("if __name__")[0]
    (example,) = (block for block in blocks if "ray.init()" in block)
    code = example.replace("ray.init()", "pass  # this process has joined a cluster")
    early = "stop={'training_iteration': 1}, " if stops else ""
    own = f"run_config=tune.RunConfig({early}storage_path={str(tmp_path / 'tune')!r}),"
    code = code.replace("param_space=", f"{own} param_space=")
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(setting, space)
    space["CONFIG"] = {**space["CONFIG"], "data": content(tmp_path)["data"]}
    if stops:
        space["CONFIG"]["train"] = {**space["CONFIG"]["train"], "steps": MANY}
    exec(code, space)
    runs = [tmp_path / "runs" / f"lr-{rate}" for rate in (0.001, 0.003)]
    check_nothing_left(*runs)
    found = [len(braid.load_run(run).validations()) for run in runs]
    assert all(1 <= count < MANY // 4 for count in found) if stops else found == [2, 2]


def test_a_trial_with_too_few_places(tmp_path: Path) -> None:
    """One bundle for itself and one for a rank, of two."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([{"CPU": 0.5}, {"CPU": 0.5}])

    @ray.remote(
        num_cpus=0.5,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        ),
    )
    def trial(config: dict[str, Any]) -> str:
        try:
            braid.train(config)
        except NoRoomError as error:
            return str(error)
        return "it ran"

    said = ray.get(trial.remote(content(tmp_path)))
    assert "asks for 2 ranks, and the placement group of this task has room for 1 beside the task" in said
    assert "reserve a bundle for every rank" in said
    ray.util.remove_placement_group(group)
    check_nothing_left()


def test_another_cluster_than_the_one_that_is_joined(tmp_path: Path) -> None:
    other = {"address": "10.0.0.1:6379"}
    with pytest.raises(
        ConfigError, match=r"cluster.address='10.0.0.1:6379': this process has joined the Ray"
    ):
        braid.train(content(tmp_path, cluster=other))
    assert not (tmp_path / "runs").exists()
