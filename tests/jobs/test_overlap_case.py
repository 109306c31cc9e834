"""Cases of `braid bench overlap`: layouts, their plans, and the link's rate for a share of communication."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from braid.actors.config import Config
from braid.actors.controller.planning import model_graphs, plan_run
from braid.jobs.bench import overlap
from braid.jobs.bench.overlap_case import LAYOUTS, OverlapCase
from braid.jobs.drill.hosts import Host, Hosts
from braid.scheduling.cost.analytic import analytic_profile
from braid.scheduling.cost.profile import Profile
from braid.scheduling.mesh.cluster import Link
from braid.scheduling.model.presets.library import cluster_preset
from tests.in_process import Capture, called, refused

REPLICAS = OverlapCase(layout="dp2", hidden=64, layers=2, tokens=32, micro_batches=3)


def profile_at(mbit: float, config: Config) -> Profile:
    """Modelled costs of two GPUs on two hosts, joined by a link without latency."""
    link = Link(kind="TCP", bytes_per_s=mbit * 1e6 / 8, latency_ns=0, efficiency=1.0)
    cluster = replace(cluster_preset("a40"), nodes=2, gpus_per_node=1, inter=link)
    return analytic_profile(cluster, config.layout(), model_graphs(config, REPLICAS.shape()), 4)


HOSTS = (Host("first", "10.0.0.1"), Host("second", "10.0.0.2"))


class NotedLink(Hosts):
    mbit = 0.0

    def shape(self, mbit: float, message_bytes: float, inside_mbit: float | None = None) -> None:
        assert (message_bytes, inside_mbit) == (REPLICAS.message_bytes, None)
        self.mbit = mbit


def test_a_balanced_load_is_part_of_the_model_that_ranks_get() -> None:
    for even in (False, True):
        assert OverlapCase(layout="ep2", route_evenly=even).shape().route_evenly == even


def test_alpha_is_the_share_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is set so that 4 bytes a parameter, in each direction, take that share of the step."""
    link = NotedLink(HOSTS, ("", ""))
    case = replace(REPLICAS, alpha=0.35)
    bench = overlap._StartedCase(case, link, "", ExitStack(), lambda text: None)
    config = case.config("megatron")
    monkeypatch.setattr(bench, "profile", lambda rounds: profile_at(link.mbit, config))
    mbit = bench.set_rate()
    assert link.mbit == mbit
    numbers = plan_run(config, bench.shape, profile_at(mbit, config)).taken.numbers
    gradients = 4 * bench.shape.parameters() * 8 / (mbit * 1e6)
    assert numbers.communication_seconds == pytest.approx(gradients, rel=0.02)
    assert numbers.communication_seconds / numbers.step_seconds == pytest.approx(0.35, abs=0.01)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "--layout dp3",
            "--layout 'dp3' must be one of tp2, tp4, pp2, tp2pp2, dp2, dp4, tp2dp2, pp2dp2, cp2, ",
        ),
        ("--schedules megatron,eager", "configuration: overlap.schedule='eager': is gone; use schedule"),
        ("--alpha 0.3 --link-mbit 100", "--link-mbit and --alpha exclude each other"),
        ("--set train.recompute=auto", "--set: give train.recompute and parallel.tensor_degrees, not auto"),
        ("--route-evenly --layout cp2", "--route-evenly needs a layout with experts, such as --layout ep2"),
        ("--inside-mbit 100 --layout cp2", "--inside-mbit needs a layout with several ranks on a"),
    ],
)
def test_wrong_options_name_what_would_be_right(capsys: Capture, words: str, says: str) -> None:
    refused(called(capsys, "bench", "overlap", *words.split()), f"braid: {says}")


def test_settings_are_those_of_a_run_and_oases_repeats_no_collective() -> None:
    case = replace(REPLICAS, settings=("parallel.zero=2", "train.recompute=full"))
    config = case.config("braid:eager_w")
    assert case.step_tokens == config.train.global_batch * case.tokens == 2 * 3 * 32
    assert (config.overlap.schedule, config.overlap.pipeline) == ("braid", "eager_w")
    assert config.layout().zero == 2
    assert "dp2, parallel.zero=2, train.recompute=full" in case.name
    policies = {name: case.config(name).recompute for name in ("megatron", "merak", "oases", "braid")}
    assert policies == {"megatron": "full", "merak": "full", "oases": "fine", "braid": "fine"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_neighbours_share_a_host_where_there_are_two_on_each(layout: str) -> None:
    ranks = replace(REPLICAS, layout=layout).config("megatron").layout().ranks
    filled = LAYOUTS[layout].filled
    hosts = [place.address for place in Hosts(HOSTS, ("", "")).places(ranks, filled=filled)]
    assert len(set(hosts)) == 2
    assert (hosts[0] == hosts[1]) == filled
    assert not filled or hosts == sorted(hosts)
