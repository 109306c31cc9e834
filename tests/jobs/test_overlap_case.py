"""Cases of `braid bench overlap`: layouts, their plans, and the link's rate for a share of communication."""

import random
from contextlib import ExitStack
from dataclasses import replace

import pytest

from braid.actors.config import Config, ConfigError
from braid.actors.controller.planning import model_graphs, plan_run
from braid.jobs.bench import overlap
from braid.jobs.bench.overlap import compared, drawn
from braid.jobs.bench.overlap_case import FILLED, LAYOUTS, MIXED, PEERS, SCHEDULES, OverlapCase
from braid.jobs.bench.peers import KINDS
from braid.jobs.bench.rounds import Spread
from braid.jobs.drill.hosts import Paced
from braid.scheduling.cost.analytic import analytic_profile
from braid.scheduling.cost.profile import Profile
from braid.scheduling.generate.named import ScheduleName
from braid.scheduling.mesh.cluster import Link
from braid.scheduling.model.presets.library import cluster_preset
from braid.scheduling.schedule.operations import Reduce, Wait
from braid.scheduling.schedule.schedule import sums_in
from tests.in_process import Capture, called, refused

REPLICAS = OverlapCase(layout="dp2", hidden=64, layers=2, tokens=32, micro_batches=3)


def profile_at(mbit: float, config: Config) -> Profile:
    """Modelled costs of two GPUs on two hosts, joined by a link without latency."""
    link = Link(kind="TCP", bytes_per_s=mbit * 1e6 / 8, latency_ns=0, efficiency=1.0)
    cluster = replace(cluster_preset("a40"), nodes=2, gpus_per_node=1, inter=link)
    return analytic_profile(cluster, config.layout(), model_graphs(config, REPLICAS.shape()), 4)


class NotedLink(Paced):
    """Its rate is only noted."""

    def shape(self, mbit: float, message_bytes: float, inside_mbit: float | None = None) -> None:
        assert (message_bytes, inside_mbit) == (REPLICAS.message_bytes, None)
        super().shape(mbit, message_bytes)


def test_every_layout_begins_with_the_serial_schedule_and_has_peers() -> None:
    assert LAYOUTS.keys() == SCHEDULES.keys() >= PEERS.keys()
    for names in SCHEDULES.values():
        assert names[0] == "megatron"
        assert [str(ScheduleName.parse(name)) for name in names] == [*names]
    assert {"megatron", "braid"} <= set(SCHEDULES["dp2"])
    assert {name.partition(",")[0] for peers in PEERS.values() for name in peers} == {*KINDS}


def test_a_balanced_load_is_part_of_the_model_that_ranks_get() -> None:
    for even in (False, True):
        assert OverlapCase(layout="ep2", route_evenly=even).shape().route_evenly == even


@pytest.mark.parametrize("schedule", SCHEDULES["dp2"])
def test_replicas_have_micro_batches_each_and_sum_gradients(schedule: str) -> None:
    config = REPLICAS.config(schedule)
    outcome = plan_run(config, REPLICAS.shape(), profile_at(100, config)).taken
    assert config.layout().ranks == 2
    assert outcome.setting.micro_batches == REPLICAS.micro_batches
    assert REPLICAS.step_tokens == config.train.global_batch * REPLICAS.tokens == 2 * 3 * 32
    (stage,) = outcome.code.schedule.stages
    assert [one for i in stage for one in sums_in(i)] == [Reduce(0, "dp")]
    assert Wait(Reduce(0, "dp")) in stage


def test_alpha_is_the_share_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is set so that 4 bytes a parameter, in each direction, take that share of the step."""
    link = NotedLink()
    case = replace(REPLICAS, alpha=0.35)
    bench = overlap._StartedCase(case, link, "", ExitStack(), lambda text: None)
    config = case.config("megatron")
    monkeypatch.setattr(
        bench, "_measure", lambda rounds=5: profile_at(link.cluster["emulated_link_mbit"], config)
    )
    mbit = bench.set_rate()
    assert link.cluster == {"emulated_link_mbit": mbit}
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
        (
            "--layout dp2 --schedules megatron,eager",
            "--schedules: schedule='eager' is gone; use schedule megatron with p",
        ),
        ("--schedules megatron,bread", "--schedules: schedule='bread' is not known; did you mean 'braid'?"),
        ("--alpha 0.3 --link-mbit 100", "--link-mbit and --alpha exclude each other"),
        ("--route-evenly --layout cp2", "--route-evenly needs a layout with experts, such as --layout ep2"),
        ("--inside-mbit 100 --layout cp2", "--inside-mbit needs a layout with several ranks on a"),
    ],
)
def test_wrong_options_name_what_would_be_right(capsys: Capture, words: str, says: str) -> None:
    refused(called(capsys, "bench", "overlap", *words.split()), f"braid: {says}")


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "ddp"])
def test_baselines_on_the_data_axis(name: str) -> None:
    """Those that are named by a stage are ``ddp`` under it, beside schedules of another one."""
    config = REPLICAS.config(name)
    assert config.layout().zero == (int(name[-1]) if name.startswith("zero") else 0)
    assert config.overlap.schedule == "ddp"
    REPLICAS.check([name])
    if name != "ddp":
        says = f"^--schedules: schedule='{name}' is not known; here that is par"
        with pytest.raises(ConfigError, match=says):
            OverlapCase(layout="tp2").check([name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_neighbours_share_a_host_where_there_are_two_on_each(layout: str) -> None:
    ranks = replace(REPLICAS, layout=layout).config("megatron").layout().ranks
    filled = layout in FILLED
    hosts = [place.machine for place in Paced().places(ranks, filled=filled)]
    assert len(set(hosts)) == 2
    assert (hosts[0] == hosts[1]) == filled
    assert not filled or hosts == sorted(hosts)


@pytest.mark.parametrize("layout", MIXED)
def test_degrees_stand_behind_the_schedule(layout: str) -> None:
    case = OverlapCase(layout=layout, hidden=256, layers=4, tokens=256, micro_batches=3, recompute="full")
    tp = LAYOUTS[layout]["tp"]
    names = compared(case)
    assert names[0] == "megatron"
    assert names[-1] == "oases planned"
    for name in names[1:-1]:
        config = case.config(name)
        assert config.recompute == "fine"
        assert len(set(config.parallel.tensor_degrees or ())) == 1
    assert case.config("megatron").layout().tensor_degrees == ()
    assert case.config(names[-1]).chooses_layers
    assert case.samples == tp == case.config("megatron").train.micro_batch
    assert case.step_tokens == 3 * 256


def test_drawn_degrees_differ_and_reach_from_one_to_the_other() -> None:
    case = OverlapCase(layout="mixed2", layers=8, hidden=256)
    found = drawn("oases", case, 16)
    assert len(set(found)) == 16
    ones = {name.count("1") for name in found}
    assert min(ones) <= 2
    assert max(ones) >= 6
    assert len(drawn("oases", OverlapCase(layout="mixed2", layers=2, hidden=256), 16)) == 4


# What is said of repeated measurements.


@pytest.mark.parametrize("count", [6, 9, 25, 150])
def test_the_median_lies_where_it_is_said_to(count: int) -> None:
    draws = 1500
    inside = 0
    for _ in range(draws):
        spread = Spread.of([random.expovariate(1.0) for _ in range(count)])
        assert spread.median_from <= spread.median <= spread.median_to
        inside += spread.median_from <= 0.6931 <= spread.median_to
    assert inside / draws > 0.925, "95 % and four standard errors"


def test_few_measurements_say_no_more_than_their_extremes() -> None:
    spread = Spread.of([3.0, 1.0, 2.0])
    assert (spread.median_from, spread.median, spread.median_to) == (1.0, 2.0, 3.0)
