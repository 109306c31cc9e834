"""What a schedule says of how collectives are cut: it round-trips, and nonsense is refused with its cause."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings

from braid.scheduling.generate.partitions import with_partitions
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.partition import (
    Partition,
    Target,
    chosen,
    parse_partition,
)
from braid.scheduling.schedule.text import parse, write
from braid.scheduling.text.records import from_mapping, to_mapping
from tests.scheduling.cases import LLAMA, model_parts, named_schedule, setting_for
from tests.scheduling.partition_cases import PARTITIONS, collectives_of

LAYOUT = ParallelLayout(tp=4, dp=6)
ORDER = "must have every dim of the mesh once"
DELIVERED = "what is cut as delivered needs a mesh, dim=tokens and pieces=1"
NOWHERE = "there is no such part or axis; parts are embedding, layer, head, axes tp, dp"
PARTS = model_parts(LLAMA, 4)
COLLECTIVES = ", ".join(op.name for _, op in collectives_of(PARTS["layer"]))


# -- text ----------------------------------------------------------------------------------------------------


@given(PARTITIONS)
@settings(max_examples=100)
def test_text_round_trips(one: Partition) -> None:
    text = str(one)
    assert parse_partition(text) == one
    assert from_mapping(Partition, to_mapping(one), "partition") == one


# -- nonsense ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("gather pieces 2", "write PART/COLLECTIVE, or AXIS/KIND such as tp/all_gather"),
        ("a/b mesh 4 order 0", "mesh=4 needs two dims or more, of 2 ranks or more"),
        ("a/b mesh 4x1 order 0,1", "mesh=4x1 needs two dims or more, of 2 ranks or more"),
        ("a/b mesh 2x2 order 0,0", f"order=0,0 {ORDER}, 0,1 in any order"),
        ("a/b mesh 2x2x2 order 1,0,1", f"order=1,0,1 {ORDER}, 0,1,2 in any order"),
        ("a/b pieces 0", "pieces=0 must be between 1 and 64"),
        ("a/b pieces 65", "pieces=65 must be between 1 and 64"),
        ("a/b pieces 2 of rows with 1", "dim='rows' must be one of tokens, width, or left out"),
        ("a/b pieces 2 of tokens with 0", "operators=0 are cut along dim='tokens'; give both or none"),
        ("a/b pieces 2 of width with 2", "operators=2: along the width it can be 1 alone"),
        ("a/b delivered of tokens with 1", DELIVERED),
        ("a/b mesh 2x2 order 0,1 delivered of width with 1", DELIVERED),
        ("a/b", "it cuts nothing; give pieces or a mesh, or leave it out"),
    ],
)
def test_what_cuts_nothing_or_cannot_cut_is_refused(text: str, cause: str) -> None:
    """By the words of the partition itself, wherever it stands."""
    with pytest.raises(ValueError) as error:
        parse_partition(text)
    assert str(error.value) == f"partition {text.split()[0]}: {cause}"


def test_what_text_cannot_say_is_refused_too() -> None:
    for wrong, cause in (
        ({"order": (0, 1)}, f"order=0,1 {ORDER}; without a mesh it is empty"),
        ({"operators": 1}, "operators=1 are cut along dim=''; give both or none"),
        ({"dim": "tokens", "operators": -1}, "operators=-1 are cut along dim='tokens'; give both or none"),
    ):
        with pytest.raises(ValueError) as error:
            Partition(what=Target("a", "b"), pieces=2, **wrong)  # type: ignore[arg-type]
        assert str(error.value) == f"partition a/b: {cause}"


OTHER_WORDS = """
| a/b mesh 2x2 | a/b order 0,1 mesh 2x2 | a/b mesh 2by2 order 0,1 | a/b pieces | a/b pieces -2
| a/b pieces 2 delivered | a/b pieces 2 of tokens | a/b with 1 pieces 2 | a/b  pieces 2 | a/b pieces 2 now
| a/b pieces 02 | a/b mesh 2x2 order 0,,1
"""


@pytest.mark.parametrize("text", [text.strip() for text in OTHER_WORDS.split("|")])
def test_other_words_are_refused_with_how_to_write_them(text: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_partition(text)
    usage = "WHAT [mesh 2x4 order 0,1] [pieces 4 | delivered] [of tokens with 1]"
    assert str(error.value) == f"partition {text!r} is not {usage}"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("tp/all_gather mesh 2x4 order 0,1", "mesh=2x4 has 8 ranks, the axis tp has 4"),
        ("dp/all_reduce mesh 2x2 order 0,1", "mesh=2x2 has 4 ranks, the axis dp has 6"),
        ("encoder/mlp_gather pieces 2", NOWHERE),
        ("pp/all_gather pieces 2", NOWHERE),
        ("tp/gather pieces 2", NOWHERE),
        ("tp/all_reduce pieces 2", "over tp it can be of all_gather, reduce_scatter"),
        ("dp/all_to_all mesh 2x3 order 0,1", "over dp it can be of all_gather, reduce_scatter, all_reduce"),
        (
            "layer/qkv pieces 2",
            f"that is no all-gather or reduce-scatter of a layer; layer has {COLLECTIVES}",
        ),
        ("head/logits_gather pieces 2", "that is no all-gather or reduce-scatter of a layer; head has none"),
        ("layer/mlp_gather pieces 2 of tokens with 3", "operators=3, but 2 beside it can be cut"),
        *[
            (f"dp/{kind} {how}", "what replicas share is cut in buckets; give a mesh and an order alone")
            for kind in ("all_gather", "all_reduce")
            for how in ("pieces 2", "mesh 2x3 order 1,0,1", "mesh 2x3 order 0,1 delivered of tokens with 1")
        ],
    ],
)
def test_what_does_not_fit_model_and_layout_is_refused(text: str, cause: str) -> None:
    with pytest.raises(ValueError) as error:
        with_partitions(PARTS, (parse_partition(text),), LAYOUT)
    assert str(error.value) == f"partition {text.split()[0]}: {cause}"


@pytest.mark.parametrize(
    "text", ["tp/reduce_scatter pieces 16 of tokens with 1", "layer/mlp_gather mesh 2x2 order 1,0,1 pieces 9"]
)
def test_empty_pieces_are_refused(text: str) -> None:
    one = parse_partition(text)
    with pytest.raises(ValueError) as error:
        with_partitions(PARTS, (one,), LAYOUT)
    assert str(error.value) == (
        f"partition {one.what}: pieces={one.pieces} of 8 tokens of 64 elements leave some "
        f"empty; use fewer pieces"
    )
    fitting = replace(one, pieces=8)
    assert with_partitions(PARTS, (fitting,), LAYOUT)["layer"] != PARTS["layer"]


@pytest.mark.parametrize(
    "text",
    [
        "layer/mlp_gather.grad mesh 2x2 order 1,0,1 pieces 2 of tokens with 1",
        "tp/reduce_scatter mesh 2x2 order 1,0,1",
        "tp/all_gather mesh 2x2 order 1,0,1 pieces 2 of width with 1",
        "tp/reduce_scatter mesh 2x2 order 1,0 delivered of tokens with 1",
    ],
)
def test_what_would_compute_something_else_is_refused(text: str) -> None:
    """Sums are not gathered in two ways at once, and delivered by no stage before the last; a product along
    the width needs all rows at once."""
    one = parse_partition(text)
    with pytest.raises(ValueError, match=f"^partition {re.escape(str(one.what))}: "):
        with_partitions(PARTS, (one,), LAYOUT)


def test_two_for_the_same_collective_are_refused() -> None:
    """As in the text of a schedule, which could not be read again."""
    twice = tuple(Partition(what=Target("tp", "all_gather"), pieces=pieces) for pieces in (2, 4))
    with pytest.raises(ValueError, match="partition tp/all_gather"):
        setting_for("megatron", ParallelLayout(tp=4), 2, partitions=twice)


# -- in the text of a schedule -------------------------------------------------------------------------------

TEXT = write(named_schedule("ddp", 1, 2, 2, zero=3))
HEAD = "keep 4\n"


@pytest.mark.parametrize(
    ("lines", "number", "cause"),
    [
        ("partition a/b pieces 2\npartition a/b pieces 4", 9, "partition a/b stands twice"),
        (
            "partition a/b pieces 2\npartition a/b",
            10,
            "partition a/b: it cuts nothing; give pieces or a mesh",
        ),
        ("partition", 9, "partition '' is not WHAT [mesh 2x4 order 0,1]"),
        ("partitions a/b pieces 2", 9, "expected 'stage 0', found 'partitions a/b pieces 2'"),
        ("partition a/b pieces 2\nkeep 4", 10, "expected 'stage 0', found 'keep 4'"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(lines: str, number: int, cause: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'schedule, line {number}: {cause}')}"):
        parse(TEXT.replace(HEAD, f"{HEAD}{lines}\n"))


def test_the_first_name_that_has_a_partition_counts() -> None:
    own, of_kind = (
        Partition(what=Target("layer", "mlp_gather"), pieces=2),
        Partition(what=Target("tp", "all_gather"), pieces=4),
    )
    for order in ((own, of_kind), (of_kind, own)):
        assert chosen(order, "layer/mlp_gather", "tp/all_gather") is own
        assert chosen(order, "layer/attention_gather", "tp/all_gather") is of_kind
        assert chosen(order, "layer/mlp_scatter", "tp/reduce_scatter") is None


@pytest.mark.parametrize(
    ("zero", "kind"), [(0, "reduce_scatter"), (0, "all_gather"), (1, "all_reduce"), (3, "all_reduce")]
)
def test_what_replicas_do_not_use_is_refused(zero: int, kind: str) -> None:
    """It would be planned, and never run."""
    layout = ParallelLayout(dp=4, zero=zero)
    one = Partition(what=Target("dp", kind), mesh=(2, 2), order=(1, 0))
    parts = model_parts(LLAMA)
    with pytest.raises(ValueError, match=f"^partition dp/{kind}: with parallel.zero={zero} replicas use"):
        with_partitions(parts, (one,), layout)
