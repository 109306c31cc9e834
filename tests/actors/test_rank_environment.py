"""What ranks' processes begin with, and which device each takes."""

import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from braid.actors.config import Config, ConfigError, parse_config
from braid.actors.config.machines import NcclConfig
from braid.actors.config.variables import inherited
from braid.actors.controller.ranks import processes
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.controller.ranks.rank_environment import gpus_here, rank_environment
from braid.actors.stage.rank import groups as mesh
from braid.actors.stage.rank.devices import local_rank, set_arithmetic
from braid.kernels.collectives.communicator import Pairs


def config_of(**cluster: object) -> Config:
    return parse_config({"name": "x", "data": {"files": ["x"]}, "cluster": cluster})


def test_a_lost_peer_does_not_end_the_process_and_the_same_bits_need_the_same_algorithms() -> None:
    found = rank_environment(config_of(threads_per_rank=3), {})
    assert "NCCL_ALGO" not in found
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == found["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert found["CUDA_MODULE_LOADING"] == "EAGER"
    names = ("PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER", "OMP_NUM_THREADS")
    assert [found[name] for name in names] == ["expandable_segments:True", "0", "3"]
    strict = parse_config({"train": {"deterministic": True}})
    found = rank_environment(strict, {})
    assert {"NCCL_ALGO", "NCCL_PROTO", "CUBLAS_WORKSPACE_CONFIG"} <= set(found)
    assert found["NCCL_MIN_NCHANNELS"] == found["NCCL_MAX_NCHANNELS"]


def test_users_have_the_last_word() -> None:
    outside = {"CUDA_MODULE_LOADING": "LAZY"}
    own = {"NCCL_SOCKET_IFNAME": "eth1", "OMP_NUM_THREADS": "8"}
    found = rank_environment(config_of(env=own), outside)
    assert "CUDA_MODULE_LOADING" not in found
    assert own.items() <= found.items()


def test_names_without_a_value_are_inherited_and_not_shown() -> None:
    config = config_of(env={"API_TOKEN": None, "NCCL_DEBUG": "WARN"})
    outside = {"API_TOKEN": "canary", "OTHER": "x"}
    assert inherited(config.cluster.env, outside) == {"API_TOKEN": "canary"}
    assert "API_TOKEN" not in rank_environment(config, outside)
    with pytest.raises(ConfigError, match=r"^cluster\.env\.API_TOKEN=null: .* not set; set it there"):
        inherited(config.cluster.env, {"OTHER": "x"})


def test_ranks_that_are_processes_inherit_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(processes.ProcessGroup, "_start", lambda self, rank: None)
    monkeypatch.setattr(processes, "gpus_here", lambda environment: 0)
    group = processes.ProcessGroup(
        [processes.ProcessPlace()], config_of(env={"OMP_NUM_THREADS": None}), processes._worker
    )
    assert group._environment["OMP_NUM_THREADS"] == "7"


def driver(folder: Path, count: int) -> Path:
    """What NVIDIA's driver shows of so many GPUs."""
    for number in range(count):
        (folder / f"0000:{number:02}:00.0").mkdir()
    return folder


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 4), ("", 0), ("2", 1), ("0,1", 2), ("0,1,2,3,4,5", 4), ("GPU-a, GPU-b", 2)]
)
def test_gpus_are_counted_without_torch(tmp_path: Path, visible: str | None, count: int) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus_here(environment, driver(tmp_path, 4)) == count
    assert gpus_here(environment, tmp_path / "none") == 0


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "gpus_here", lambda environment: 2)
    launcher = ProcessLauncher(config_of(cpus_per_rank=0.1))
    launcher.check(2)
    with pytest.raises(
        ConfigError, match=r"3 ranks of cluster\.device='auto', this machine has 2 GPUs; lower"
    ):
        launcher.check(3)


def test_a_quota_bounds_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "gpus_here", lambda environment: 0)
    monkeypatch.setattr(processes, "usable_cpus", lambda: 1.5)
    launcher = ProcessLauncher(config_of(cpus_per_rank=0.5))
    launcher.check(3)
    assert launcher.capacity(None) == (3, False)
    with pytest.raises(ConfigError, match=r"this machine has 1\.5 CPUs; .*cluster\.cpus_per_rank=0\.375$"):
        launcher.check(4)


def test_a_loopback_that_is_down_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = Mock(side_effect=OSError(101, "Network is unreachable"))
    monkeypatch.setattr(processes, "gpus_here", lambda environment: 0)
    monkeypatch.setattr(processes.socket, "create_connection", unreachable)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1.*\(Network is unreachable\); .*ip link set lo up"):
        ProcessLauncher(config_of(cpus_per_rank=0.1)).check(2)
    ProcessLauncher(config_of(cpus_per_rank=0.1), [processes.ProcessPlace(namespace="a")] * 2).check(2)


def test_a_low_limit_of_open_files_is_raised() -> None:
    program = (
        "import resource as r\n"
        "hard = min(r.getrlimit(r.RLIMIT_NOFILE)[1], 4096)\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, hard))\n"
        "from braid.actors.controller.ranks.rank_environment import allow_open_files\n"
        "allow_open_files()\n"
        "assert r.getrlimit(r.RLIMIT_NOFILE) == (hard, hard)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("hosts", "numbers"),
    [((), [0, 1, 2, 3]), (("a", "a", "b", "b"), [0, 1, 0, 1]), (("a", "b", "a", "b"), [0, 0, 1, 1])],
)
def test_a_rank_takes_the_device_of_its_number_on_its_host(
    hosts: tuple[str, ...], numbers: list[int]
) -> None:
    assert [local_rank(rank, hosts) for rank in range(4)] == numbers


def test_an_error_does_not_end_the_thread_that_shows_life(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = multiprocessing.Pipe()
    rank = Mock(pulse=Mock(side_effect=[RuntimeError("CUDA error: of something else"), 2]))
    thread = threading.Thread(target=processes.answer, args=(theirs, [rank]), daemon=True)
    thread.start()
    answers = []
    for _ in range(2):
        ours.send(("pulse", ()))
        assert ours.poll(10)
        answers.append(ours.recv())
    assert answers == [(None,), (2,)]
    ours.close()
    thread.join(10)
    assert "of something else" in capsys.readouterr().err


@pytest.fixture
def arithmetic() -> Iterator[None]:
    """Torch's switches, which are as before after the test."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    tf32 = torch.backends.cuda.matmul.allow_tf32
    yield
    set_arithmetic(deterministic=deterministic, tf32=tf32)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("tf32", [True, False])
def test_switches_are_as_configured_whatever_a_run_before_has_set(deterministic: bool, tf32: bool) -> None:
    for turn in (not deterministic, deterministic):
        set_arithmetic(deterministic=turn, tf32=tf32 == (turn == deterministic))
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert torch.backends.cuda.matmul.allow_tf32 == tf32


# -- what communicators are made with ------------------------------------------------------------------------


def options_of(is_high_priority_stream: bool) -> SimpleNamespace:
    """As torch's, which a build without NCCL lacks."""
    config = SimpleNamespace(max_ctas=-1)
    return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=config, _timeout=None)


def test_communicators_are_given_the_limits_of_their_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[list[int], Any]] = []

    def new_group(ranks: list[int], **named: Any) -> str:
        assert named["use_local_synchronization"]
        assert named["backend"] == "nccl", "and no connections of gloo's beside it"
        made.append((ranks, named["pg_options"]))
        return "group"

    limit = timedelta(seconds=7)
    monkeypatch.setattr(mesh.dist, "ProcessGroupNCCL", SimpleNamespace(Options=options_of), raising=False)
    monkeypatch.setattr(mesh.dist, "new_group", new_group)
    monkeypatch.setattr(mesh.dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    nccl = NcclConfig.model_validate({"tp": {"max_ctas": 8}})
    groups = mesh.TorchGroups(5, limit, nccl)
    assert groups.line("tp", [[0, 1], [2, 3]]) is None
    groups.line("tp", [[0, 1], [4, 5]])
    groups.line("dp", [[1, 5]])
    groups.line("ends", [[2, 5]])
    pairs = groups.channel([[1, 3, 5, 7]])
    assert isinstance(pairs, Pairs)
    assert sorted(pairs.pairs) == [1, 3]
    assert [ranks for ranks, _ in made] == [[4, 5], [1, 5], [2, 5], [3, 5], [5, 7]]
    tp, dp, ends, *messages = (options for _, options in made)
    assert tp.config.max_ctas == 8
    assert dp.config == ends.config == SimpleNamespace(max_ctas=-1)
    assert all(one.config.max_ctas == 2 for one in messages)
    assert all(options.is_high_priority_stream and options._timeout == limit for _, options in made)


@pytest.mark.parametrize("stages", range(2, 10))
def test_pairs_of_a_pipeline_are_used_for_the_first_time_side_by_side(stages: int) -> None:
    """Each of them blocks both its ranks until both have come: three rounds, however long the pipeline."""
    left: list[list[int]] = []
    for rank in range(stages):
        own: list[int] = []

        def make(pair: Sequence[int], rank: int = rank, own: list[int] = own) -> Any:
            (other,) = set(pair) - {rank}
            return SimpleNamespace(warm_up=lambda: own.append(other))

        mesh.pairs_of(range(stages), rank, make).warm_up()
        assert sorted(own) == sorted({(rank - 1) % stages, (rank + 1) % stages})
        left.append(own)
    rounds = 0
    while any(left):
        met = [(rank, own[0]) for rank, own in enumerate(left) if own and left[own[0]][0] == rank]
        assert met, "every rank waits for another one"
        for rank, _ in met:
            left[rank].pop(0)
        rounds += 1
    assert rounds <= 3
