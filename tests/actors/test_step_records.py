"""A step's records: what ran, for which block and when, whatever ran in the step before."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from braid.actors.stage.gloo_streams import HostStreams
from braid.actors.stage.step_records import StepRecorder
from braid.actors.stage.streams import Transfer
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import Pass, PassKind, Strand
from braid.scheduling.trace import DIRECTIONS, KINDS, STRANDS, Label, communication

LABELS = [
    Label(operator=f"operator {n}", stream=stream, layer=n, bytes=n, key=f"{stream.value} {n}")
    for n in range(4)
    for stream in Stream
]
PASSES = [
    None,
    *(
        Pass(kind, micro_batch, chunk, strand)
        for kind in PassKind
        for micro_batch in range(3)
        for chunk in range(2)
        for strand in Strand
    ),
]
Ran = list[tuple[Label | None, Pass | None, bool, int, int]]
"""Label, or None for a block; block; whether paired; begin and end."""


def a_step(random: Random, program: list[tuple[Label | None, Pass | None, bool]]) -> Ran:
    found, now = [], random.randrange(10**9)
    for what in program:
        begin = now + random.randrange(-50, 50)
        now = begin + random.randrange(1, 100)
        found.append((*what, begin, now))
    return found


def a_program(random: Random) -> list[tuple[Label | None, Pass | None, bool]]:
    return [
        (random.choice([*LABELS, None]), random.choice(PASSES[1:]), random.random() < 0.5)
        if random.random() < 0.8
        else (random.choice(LABELS), None, False)
        for _ in range(random.randrange(60))
    ]


def record(recorder: StepRecorder, ran: Ran) -> None:
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


@given(st.integers(0, 2**31))
def test_records_say_what_ran(seed: int) -> None:
    random = Random(seed)
    streams = HostStreams()
    recorder = StepRecorder(streams, {label.key: n for n, label in enumerate(LABELS)})
    program = a_program(random)
    for step in range(6):
        if random.random() < 0.3:  # another one: a validation, a discarded step, a step of other batches
            program = a_program(random)
        ran = a_step(random, program)
        record(recorder, ran)
        records = recorder.records(step)
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
            assert line["step"] == step
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
        assert (numbers.communication_ns, numbers.exposed_ns) == (plain.communication_ns, plain.exposed_ns)
        spans = recorder.spans(0, step)
        expected = [end - begin for _, (begin, end) in sorted(times, key=lambda one: sort_of(one[0]))]
        assert [span.end_ns - span.start_ns for span in spans] == expected


def test_nothing_is_recorded_unless_asked() -> None:
    recorder = StepRecorder(HostStreams(), recording=False)
    record(recorder, a_step(Random(1), [(LABELS[0], None, False), (None, PASSES[1], True)]))
    assert not len(recorder.records(0))
    assert recorder.numbers(recorder.records(0)).communication_ns == 0
