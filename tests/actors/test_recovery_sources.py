"""Where ranks' states come from after a failure, against every state that there is, by brute force."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from braid.actors.controller.state.recovery import newest_common, partner_shift
from braid.actors.stage.rank.messages import CopiesHeld
from braid.scheduling.mesh.layout import ParallelLayout

LAYOUTS = st.builds(ParallelLayout, dp=st.integers(1, 3), tp=st.integers(1, 3), pp=st.integers(1, 3))

HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


def shard(rank: int, layout: ParallelLayout) -> tuple[int, int]:
    """What a rank holds: ranks with the same one hold the same state."""
    place = layout.coordinate(rank)
    return place["tp"], place["pp"]


@st.composite
def placed(draw: st.DrawFn) -> tuple[ParallelLayout, list[str]]:
    """A layout, and the host of every rank."""
    layout = draw(LAYOUTS)
    return layout, [draw(st.sampled_from(HOSTS)) for _ in range(layout.ranks)]


@given(placed())
def test_partners_are_on_other_hosts_where_they_can_be(case: tuple[ParallelLayout, list[str]]) -> None:
    layout, hosts = case
    ranks = layout.ranks
    shift = partner_shift(hosts, layout.mesh)
    assert 0 <= shift < ranks

    def elsewhere(by: int) -> int:
        return sum(hosts[rank] != hosts[(rank + by) % ranks] for rank in range(ranks))

    if shift == 0:
        for rank in range(ranks):
            others = [r for r in range(ranks) if shard(r, layout) == shard(rank, layout)]
            assert ranks == 1 or any(hosts[r] != hosts[rank] for r in others)
    else:
        counts = [elsewhere(by) for by in range(1, ranks)]
        assert elsewhere(shift) == max(counts)
        assert counts.index(max(counts)) + 1 == shift, "the smallest of the best"


def kept(rank: int, shift: int, ranks: int, own: Sequence[int], partners: Sequence[int]) -> CopiesHeld:
    """What a rank holds; without a shift nobody's but its own."""
    source = (rank - shift) % ranks if shift else None
    return CopiesHeld(own=tuple(own), partner=source, partners=tuple(partners) if shift else ())


def empty(rank: int, shift: int, ranks: int) -> CopiesHeld:
    """A rank that was started anew."""
    return kept(rank, shift, ranks, (), ())


@st.composite
def holdings(draw: st.DrawFn) -> tuple[ParallelLayout, list[CopiesHeld]]:
    """A layout, and what every rank has left, after ranks were lost with copies under way."""
    layout = draw(LAYOUTS)
    ranks = layout.ranks
    shift = draw(st.integers(0, ranks - 1))
    steps = st.sets(st.integers(0, 4), max_size=2).map(sorted)
    lost = draw(st.sets(st.integers(0, ranks - 1), max_size=ranks))
    held = [
        empty(rank, shift, ranks) if rank in lost else kept(rank, shift, ranks, draw(steps), draw(steps))
        for rank in range(ranks)
    ]
    return layout, held


@given(holdings(), st.integers(0, 5))
def test_the_newest_step_is_found_and_its_sources_hold_it(
    case: tuple[ParallelLayout, list[CopiesHeld]], done: int
) -> None:
    layout, held = case
    ranks = range(layout.ranks)
    there = {(step, shard(rank, layout)) for rank in ranks for step in held[rank].own}
    pairs = [(one.partner, one.partners) for one in held if one.partner is not None]
    there |= {(step, shard(partner, layout)) for partner, steps in pairs for step in steps}
    whole = (step for step in range(5) if all((step, shard(rank, layout)) in there for rank in ranks))
    possible = [step for step in whole if step <= done]
    common = newest_common(held, layout.mesh, done)
    if not possible:
        assert common is None
        return
    assert common is not None, f"step {max(possible)} is there"
    step, sources = common
    assert step == max(possible)
    assert len(sources) == layout.ranks
    for rank, source in enumerate(sources):
        one = held[source]
        as_own = step in one.own and shard(source, layout) == shard(rank, layout)
        partners = one.partner is not None and shard(one.partner, layout) == shard(rank, layout)
        as_partner = partners and step in one.partners
        assert as_own or as_partner
        if step in held[rank].own:
            assert source == rank, "nothing travels that is there"
