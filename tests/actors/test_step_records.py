"""A step's records: what ran, for which block and when, whatever ran in the step before."""

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.run.gloo_streams import HostStreams
from braid.actors.stage.run.streams import Transfer
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.model.operators import Kind
from braid.scheduling.schedule.operations import Pass, PassKind, Strand
from braid.scheduling.trace.arrays import IntArray
from braid.scheduling.trace.spans import DIRECTIONS, KINDS, STRANDS, Label, OverlapNumbers
from tests.spans import communication

LABELS = [
    Label(operator=f"operator {n}", stream=stream, layer=n, bytes=n, key=f"{stream.value} {n}")
    for n in range(4)
    for stream in Stream
]
FORWARD, BACKWARD = Pass(PassKind.FORWARD, 2, 1), Pass(PassKind.WEIGHT, 0, 0, Strand.BETA)
Ran = list[tuple[Label | None, Pass | None, bool, int, int]]
"""Label, or None for a block; block; whether paired; begin and end."""
PROGRAM: list[tuple[Label | None, Pass | None, bool]] = [
    *((label, FORWARD, False) for label in LABELS),
    *((label, None, False) for label in reversed(LABELS)),
    *((None, block, paired) for block in (FORWARD, BACKWARD) for paired in (True, False)),
    (LABELS[0], BACKWARD, False),
]


def record(recorder: Recorder, ran: Ran) -> None:
    recorder.clear()
    for label, block, paired, begin, end in ran:
        if label is None:
            assert block is not None
            recorder.block(paired, block, begin, end)
        elif label.stream is Stream.COMPUTE:
            recorder.compute(label, block, begin, end)
        else:
            recorder.transfer(label, block, Transfer(launch=None, work=None, begin=begin, end=end))


def sort_of(label: Label | None) -> int:
    return 2 if label is None else int(label.stream is not Stream.COMPUTE)


@given(st.randoms(use_true_random=False))
def test_records_say_what_ran(random: Random) -> None:
    """Also after another program: a validation, a discarded step, a step of other batches."""
    recorder = Recorder(HostStreams(), {label.key: n for n, label in enumerate(LABELS)})
    for program in (PROGRAM, PROGRAM, PROGRAM[::2], PROGRAM, [], PROGRAM[::-1]):
        begins = sorted(random.randrange(2000) for _ in program)
        ran = [(*what, at, at + random.randrange(1, 100)) for what, at in zip(program, begins, strict=True)]
        record(recorder, ran)
        records = recorder.records()
        assert len(records) == len(ran)
        epoch = None
        for line, (label, block, paired, begin, end) in zip(
            records, sorted(ran, key=lambda one: sort_of(one[0])), strict=True
        ):
            told = recorder.labels[line["label"]]
            if label is None:
                assert told.operator == ("paired block" if paired else "block")
                assert KINDS[line["kind"]] == told.operator
            else:
                assert KINDS[line["kind"]] == "operator"
                assert (told.operator, told.stream, told.layer) == (label.operator, label.stream, label.layer)
                assert told.solo_ns == LABELS.index(label)
            epoch = line["start_ns"] - begin if epoch is None else epoch
            assert (line["start_ns"] - epoch, line["end_ns"] - epoch) == (begin, end)
            if block is None:
                assert (line["micro_batch"], line["chunk"]) == (-1, -1)
                assert (STRANDS[line["strand"]], DIRECTIONS[line["direction"]]) == ("", "")
            else:
                assert (line["micro_batch"], line["chunk"]) == (block.micro_batch, block.chunk)
                assert STRANDS[line["strand"]] == block.strand.value
                assert DIRECTIONS[line["direction"]] == ("forward" if block.forward else "backward")
        numbers = recorder.numbers(records)
        times = [(label, (begin, end)) for label, _, _, begin, end in ran if label is not None]
        plain = communication(
            [when for label, when in times if label.stream is Stream.COMPUTE],
            [when for label, when in times if label.stream is not Stream.COMPUTE],
        )
        assert (numbers.communication_ns, numbers.exposed_ns) == plain


def test_nothing_is_recorded_unless_asked() -> None:
    recorder = Recorder(HostStreams(), recording=False)
    record(recorder, [(LABELS[0], None, False, 1, 2), (None, FORWARD, True, 1, 2)])
    assert not len(recorder.records())
    assert recorder.numbers(recorder.records()).communication_ns == 0


class _Members:
    """Ranks of one axis that meet: each gives its array and gets everyone's, by number."""

    def __init__(self, recorders: list[Recorder]) -> None:
        self._recorders = recorders

    def exchange(self, axis: str, own: IntArray) -> IntArray:
        rows = [
            np.array([(rank, 0, 0, 0), *one.collectives()[axis]], np.int64)
            for rank, one in enumerate(self._recorders, start=5)
        ]
        assert any((own == row).all() for row in rows)
        return np.stack(rows)


def recorders_of(ranks: int) -> list[Recorder]:
    """Of ranks with one clock."""
    streams = HostStreams()
    streams.epoch_ns = lambda: 0  # type: ignore[method-assign]
    recorders = [Recorder(streams) for _ in range(ranks)]
    for recorder in recorders:
        recorder.clear()
    return recorders


def met(recorders: list[Recorder]) -> list[OverlapNumbers]:
    """What each says when all have met, as ranks 5, 6, ..."""
    for rank, recorder in enumerate(recorders, start=5):
        recorder.meet(rank, _Members(recorders).exchange)
    return [recorder.numbers(recorder.records()) for recorder in recorders]


@given(st.integers(0, 2**31))
def test_waiting_for_a_peer_is_no_communication(seed: int) -> None:
    """Against counting nanosecond by nanosecond, by the definition, what each of three ranks did."""
    random, recorders = Random(seed), recorders_of(3)
    both = [label for label in LABELS if label.stream is not Stream.COMPUTE]
    collectives = [(replace(random.choice(both), axis="ep"), random.randrange(1000)) for _ in range(6)]
    seen: list[list[tuple[Label, int, int]]] = []
    busy: list[list[tuple[int, int]]] = []
    for recorder in recorders:
        own, now = [], random.randrange(100)
        for label, sent in collectives:
            begin = now = now + random.randrange(60)
            end = begin + 400 + random.randrange(80)  # behind all issues, as it has to be
            own.append((label, begin, end))
            recorder.transfer(label, None, Transfer(None, None, begin, end, sent=sent + len(seen)))
        message = both[0], now, now + random.randrange(50)
        recorder.transfer(*(message[0], None, Transfer(None, None, *message[1:])))
        seen.append([*own, message])
        busy.append([(at, at + random.randrange(40)) for at in random.sample(range(500), 4)])
        for begin, end in busy[-1]:
            recorder.compute(LABELS[0], None, begin, end)
    for number, numbers in enumerate(met(recorders)):
        moving, waiting = set[int](), set[int]()
        computing = {t for begin, end in busy[number] for t in range(begin, end)}
        waits: dict[tuple[int, str], list[range]] = {}
        for place in range(len(collectives)):
            issued = [own[place][1] for own in seen]
            last = max(issued)
            moving |= set(range(last, max(last, *(own[place][2] for own in seen))))
            waiting |= set(range(issued[number], last))
            who = 5 + issued.index(last), collectives[place][0].operator
            waits.setdefault(who, []).append(range(issued[number], last))
        along = moving - computing
        moving |= set(range(*seen[number][-1][1:]))
        assert numbers.communication_ns == len(moving)
        assert numbers.exposed_ns == len(moving - computing)
        assert numbers.waiting_ns == len(waiting - computing - moving)
        assert numbers.exposed_by_axis_ns["ep"] == len(along)
        between = sum(sent + 2 for label, sent in collectives if label.stream is Stream.INTER)
        assert numbers.fullest_bytes == between
        told = {who: sum(len(set(one) - computing - moving) for one in own) for who, own in waits.items()}
        for wait in numbers.peer_waits:
            assert told[wait.peer, wait.operator] == wait.ns > 0
        longest = sorted((ns for ns in told.values() if ns), reverse=True)[:3]
        assert [wait.ns for wait in numbers.peer_waits] == longest


def test_clocks_that_contradict_each_other_are_set_right() -> None:
    """Rank 1's clock is 5 ms ahead: by it alone, rank 0 would have waited 5 ms for each of its transfers."""
    recorders = recorders_of(2)
    label = Label(operator="gather", stream=Stream.INTER, axis="tp", kind=Kind.ALL_GATHER.value)
    for ahead, recorder in zip((0, 5_000_000), recorders, strict=True):
        for at in range(0, 100_000_000, 1_000_000):
            recorder.transfer(label, None, Transfer(None, None, at + ahead, at + ahead + 200_000))
    for numbers in met(recorders):
        assert (numbers.communication_ns, numbers.waiting_ns) == (100 * 200_000, 0)


def test_a_shift_waits_for_neighbours_alone() -> None:
    """Of four ranks in a ring, rank 2 issues late: ranks 1 and 3 wait for it, rank 0 does not."""
    recorders = recorders_of(4)
    label = Label(operator="ring", stream=Stream.INTER, axis="cp", kind=Kind.SEND_RECEIVE.value)
    for recorder, begin, end in zip(recorders, (10, 10, 70, 10), (40, 100, 100, 100), strict=True):
        recorder.transfer(label, None, Transfer(None, None, begin, end))
    numbers = met(recorders)
    assert [one.waiting_ns for one in numbers] == [0, 60, 0, 60]
    assert [[wait.peer for wait in one.peer_waits] for one in numbers] == [[], [7], [], [7]]
