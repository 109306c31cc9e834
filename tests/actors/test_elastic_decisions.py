"""When a run takes other ranks, and which layout then: against all layouts, and against plain arithmetic."""

import math
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.config import Config, ConfigError, ElasticConfig, parse_config
from braid.actors.controller.ranks.elastic import Change, Degrees, Resizing, best_degrees, degrees_of
from braid.actors.controller.ranks.group import NoRoomError
from braid.actors.controller.records.run_records import Event
from braid.scheduling.trace.stragglers import Straggler
from tests.end_to_end.runs import BYTES_VOCABULARY, SMALL


def config_of(dp: int = 1, tp: int = 1, pp: int = 1, **model: Any) -> Config:
    sections = {**SMALL, "model": {**SMALL["model"], **model}}
    return parse_config({**sections, "parallel": {"dp": dp, "tp": tp, "pp": pp}})


def fits(config: Config) -> bool:
    try:
        config.check(BYTES_VOCABULARY)
    except ConfigError:
        return False
    return True


@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)]),
    st.integers(0, 7),
    st.integers(1, 6),
    st.none() | st.integers(1, 6),
)
def test_the_most_ranks_with_the_least_change(
    layers: int, now: tuple[int, int, int], capacity: int, least: int, more: int | None
) -> None:
    config = config_of(*now, layers=layers)
    elastic = ElasticConfig(min_ranks=least, max_ranks=None if more is None else least + more)
    best = best_degrees(config, capacity, fits, elastic)
    limit = capacity if elastic.max_ranks is None else min(capacity, elastic.max_ranks)
    every = [
        Degrees(dp, tp, pp)
        for dp, tp, pp in product(range(1, 8), repeat=3)
        if least <= dp * tp * pp <= limit and fits(config_of(dp, tp, pp, layers=layers))
    ]
    if not every:
        assert best is None
        return
    assert best in every
    most = max(one.ranks for one in every)
    assert best.ranks == most
    if any(one.ranks == most and one.tp == now[1] for one in every):
        assert best.tp == now[1]
        if any(one.ranks == most and (one.tp, one.pp) == now[1:] for one in every):
            assert best.pp == now[2], "the cut of the model stays where it can"
    assert degrees_of(best.of(config)) == best


ROOMY = ElasticConfig(max_ranks=8, settle_s=5.0)
NO_NODES: Any = None


def test_room_must_have_been_there_for_a_while() -> None:
    members = Resizing(ROOMY, NO_NODES, fits)
    config = config_of(dp=2)

    def look(capacity: int, now: float) -> Change | None:
        return members.to_room(config, capacity, now, 1.0, 10_000)

    for room, now in ((4, 100.0), (4, 104.9), (3, 104.95), (4, 105.0), (4, 109.9)):
        assert look(room, now) is None, "another room is waited for anew"
    less = "about 5000 s less for the 10000 steps left, for about 15 s of change"
    assert look(4, 110.0) == Change(Degrees(4, 1, 1), f"there is room for more: 2 -> 4 ranks; {less}")


@given(st.floats(0.001, 10.0), st.integers(0, 10_000), st.floats(0.1, 100.0), st.integers(1, 10))
def test_the_gain_must_exceed_the_cost(step_s: float, steps_left: int, cost_s: float, room: int) -> None:
    members = Resizing(ROOMY.model_copy(update={"settle_s": 0.0}), NO_NODES, fits)
    members.cost_s = cost_s
    change = members.to_room(config_of(dp=2), room, 0.0, step_s, steps_left)
    best: Any = best_degrees(config_of(dp=2), room, fits, ROOMY)
    stay_s, go_s = steps_left * step_s, steps_left * step_s * 2 / best.ranks + cost_s
    if not math.isclose(stay_s, go_s):
        assert (change is not None) == (go_s < stay_s)


def test_a_node_that_leaves_is_not_weighed_nor_waited_for() -> None:
    members = Resizing(ROOMY, NO_NODES, fits)
    strict = Resizing(ElasticConfig(min_ranks=3, max_ranks=4), NO_NODES, fits)
    members.leaving = strict.leaving = True
    change = members.to_room(config_of(dp=4), 2, 0.0, 0.001, 1)
    assert change == Change(Degrees(2, 1, 1), "a node is leaving: 4 -> 2 ranks")
    assert members.to_room(config_of(dp=4), 0, 1.0, 0.001, 1) is None, "nothing is left to go to"
    assert strict.to_room(config_of(dp=4), 2, 0.0, 0.001, 1) is None


@pytest.mark.parametrize(
    ("capacity", "times", "steps_left", "left"),
    [(2, 4.0, 1000, 2), (4, 1.2, 1000, 4), (2, 2.1, 1000, None), (2, 4.0, 20, None), (0, 8.0, 1000, None)],
    ids=["half of the ranks", "a spare one", "5 % faster", "for a few steps", "no room"],
)
def test_a_straggler_is_left_out_if_that_is_faster(
    capacity: int, times: float, steps_left: int, left: int | None
) -> None:
    members, config = Resizing(ROOMY, NO_NODES, fits), config_of(dp=4)
    slow = Straggler(rank=1, stage=0, times=times)
    members.to_room(config, capacity, 100.0, 1.0, steps_left)
    just_now = members.without(slow, "10.0.0.2", config, capacity, 104.9, float(steps_left))
    assert just_now is None, "nodes have come or gone: that is looked at first"
    change = members.without(slow, "10.0.0.2", config, capacity, 105.0, float(steps_left))
    assert (None if change is None else change.degrees.ranks) == left
    if change is not None:
        assert change.reason.startswith(f"rank 1 on 10.0.0.2 takes {times:.2f} times as long")


def left_over(resizing: Resizing, config: Config, why: str, left: int) -> tuple[Change, list[Event]]:
    """What a run goes on with when there is no room, and what it tells before."""
    follow, told = resizing.what_is_left(NoRoomError("gone"), why, left, config, 7, lambda: False), []
    while True:
        try:
            told.append(next(follow))
        except StopIteration as end:
            return end.value, told


@pytest.mark.parametrize(
    ("left", "counted", "ranks"), [(2, [1], 2), (0, [1], 1), (1, [2], 2), (0, [0, 2], 2)]
)
def test_survivors_have_room(left: int, counted: list[int], ranks: int) -> None:
    """Though the cluster does not count their places as free at once."""
    config = config_of(dp=3)
    nodes: Any = Mock(capacity=Mock(side_effect=[(count, False) for count in counted]))
    resizing = Resizing(ElasticConfig(min_ranks=1, max_ranks=4, wait_s=60), nodes, fits)
    change, told = left_over(resizing, config, "a node is lost", left)
    assert change.degrees.ranks == ranks
    assert change.reason == "a node is lost: gone"
    assert len(told) == len(counted) - 1, "waited for nodes"


class Cluster:
    """Nodes of two ranks each, by address."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)

    def capacity(self, group: object, avoid: Sequence[str] = ()) -> tuple[int, bool]:
        return 2 * sum(address not in avoid for address in self.addresses), False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes when it is told to."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("braid.actors.controller.ranks.elastic.time.monotonic", lambda: clock.now)
    return clock


def group_at(*addresses: str) -> Any:
    """Where a run's ranks are: two on each."""
    return SimpleNamespace(addresses=[one for one in addresses for _ in range(2)])


def test_a_slow_node_stays_out_until_its_quarantine_ends(clock: SimpleNamespace) -> None:
    """All of its ranks, at every later change too; twice as long when it is slow again."""
    cluster: Any = Cluster("10.0.0.1", "10.0.0.2")
    config = config_of(dp=4)
    resizing = Resizing(ElasticConfig(max_ranks=8, settle_s=5.0, quarantine_s=100.0), cluster, fits)
    both, one = group_at("10.0.0.1", "10.0.0.2"), group_at("10.0.0.1")
    slow = Straggler(rank=3, stage=0, times=4.0)

    def look(config: Config, group: Any, slowest: Straggler | None, seconds: float) -> Any:
        """Looks once a second for so long; the first change."""
        for _ in range(int(seconds)):
            clock.now += 1.0
            if change := resizing.look(group, config, slowest, 1.0, 100_000):
                return change
        return None

    for quarantine in (100, 200):
        change = look(config, both, slow, 10)
        assert change.degrees.ranks == 2, "none of the node's two ranks is kept"
        assert change.avoid == ("10.0.0.2",)
        assert change.reason.endswith(f"on without it, for {quarantine} s")
        smaller = change.degrees.of(config)
        left_out = clock.now
        assert look(smaller, one, None, quarantine - 20) is None, "there is no room for more"
        cluster.addresses.append("10.0.0.3")
        change = look(smaller, one, None, 10)
        assert change.degrees.ranks == 4
        assert change.avoid == ("10.0.0.2",), "a change for another reason does not take it again"
        cluster.addresses.remove("10.0.0.3")
        change = look(smaller, one, None, 100)
        assert (change.degrees.ranks, change.avoid) == (4, ())
        assert quarantine <= clock.now - left_out <= quarantine + 7


def test_a_slow_node_is_taken_again_where_nothing_else_is_left(clock: SimpleNamespace) -> None:
    cluster: Any = Cluster("10.0.0.1", "10.0.0.2")
    config, group = config_of(dp=4), group_at("10.0.0.1", "10.0.0.2")
    resizing = Resizing(ElasticConfig(max_ranks=8, settle_s=0.0), cluster, fits)
    clock.now += 2.0
    change: Any = resizing.look(group, config, Straggler(rank=2, stage=0, times=4.0), 1.0, 100_000)
    assert change.avoid == ("10.0.0.2",)
    cluster.addresses.remove("10.0.0.1")
    change, told = left_over(resizing, config, "lost", 0)
    assert (change.degrees.ranks, change.avoid, told) == (2, (), [])


def test_layouts_are_searched_for_when_something_changes_and_not_at_every_look() -> None:
    """And the best come first: of 1,024 ranks none but the layout that is taken is asked about."""
    asked: list[int] = []

    def runs(config: Config) -> bool:
        asked.append(config.layout().ranks)
        return True

    members = Resizing(ElasticConfig(max_ranks=4096, settle_s=0.0), NO_NODES, runs)
    config = config_of(dp=8)
    for second in range(100):
        members.to_room(config, 1024, float(second), 1.0, 1)
    assert asked == [1024]
    members.leaving = True
    members.to_room(config, 512, 100.0, 1.0, 1)
    assert asked == [1024, 512]
    members.refuse(Degrees(dp=512, tp=1, pp=1))
    members.to_room(config, 512, 101.0, 1.0, 1)
    assert asked == [1024, 512, 512], "another layout of as many ranks"
