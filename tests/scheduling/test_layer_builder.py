"""Widths that do not fit, and what follows from shapes for kinds of layers that are not built in."""

import pytest

from braid.scheduling.layer_builder import LayerBuilder
from braid.scheduling.sizes import PartSizes, part_sizes
from braid.scheduling.spec import ParallelLayout
from tests.scheduling.cases import GPT, LLAMA


def sizes(tp: int = 2) -> PartSizes:
    return part_sizes(LLAMA, ParallelLayout(tp=tp), 2)


def test_widths_that_do_not_fit_are_refused() -> None:
    g = LayerBuilder("layer", sizes())
    x = g.gather("gather", g.input())
    inner = g.columns("first", x, 32)
    with pytest.raises(ValueError, match=r"second: first\.out is cut over tp; use rows, or gather it first"):
        g.columns("second", inner, 32)
    with pytest.raises(ValueError, match=r"third: gather\.out is not cut over tp; use columns"):
        g.rows("third", x, 32)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_layer_of_one_matrix(tp: int, shape) -> None:
    g = LayerBuilder("layer", part_sizes(shape, ParallelLayout(tp=tp), 2))
    tokens = 2 * shape.sequence
    n = g.gather("gather", g.norm("norm", g.input()))
    y = g.columns("in", n, 3 * shape.ffn)
    assert (g.dims(y).tokens, g.dims(y).elements) == (tokens, tokens * 3 * shape.ffn // tp)
    z = g.scatter("scatter", g.rows("out", y, shape.hidden))
    part = g.build(g.residual("residual", z, "x"))
    work = 2 * tokens * shape.hidden * 3 * shape.ffn // tp
    assert [op.flops for op in part.forward.operators if op.flops] == [work, work]
    assert part.backward.flops == 4 * work
    statistics = 2 if shape.biases else 1
    assert part.values["norm.statistics"].elements == tokens // tp * statistics


def test_a_module_keeps_its_inputs_unless_told_otherwise() -> None:
    g = LayerBuilder("layer", sizes(1))
    x = g.input()
    y = g.custom("own", g.columns("in", x, 40), x, like=x)
    part = g.build(g.custom("last", y, saved_elements=7, flops=11))
    tokens = 2 * LLAMA.sequence
    assert part.values["own.saved"].elements == tokens * (40 + LLAMA.hidden)
    assert part.values["own.out"].elements == tokens * LLAMA.hidden
    assert (part.values["last.saved"].elements, part.forward.named("last").flops) == (7, 11)
