"""The operator graphs: data flow, gradients, sizes, and what recomputation leaves."""

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.builder import LayerBuilder
from braid.scheduling.model.operators import Graph, Kind, Operator, Part, Phase, Precision
from braid.scheduling.model.recompute import RECOMPUTE_POLICIES, with_recompute
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import PartSizes
from tests.scheduling.cases import GPT, LLAMA, TOKENS, model_parts

FORWARD = """
attention_norm attention_gather qkv attention projection attention_scatter attention_residual
mlp_norm mlp_gather mlp_in activation mlp_out mlp_scatter mlp_residual
"""


def computing(operators: str) -> str:
    """The names of a list that are not those of collectives."""
    return " ".join(name for name in operators.split() if "gather" not in name and "scatter" not in name)


def names(graph: Graph) -> list[str]:
    """Operator names in the graph's order."""
    return [op.name for op in graph.operators]


def both(part: Part) -> tuple[Operator, ...]:
    """The operators of both passes."""
    return (*part.forward.operators, *part.backward.operators)


def builder(name: str = "layer", tp: int = 1, shape: ModelShape = GPT) -> LayerBuilder:
    """Of a layer for one sample; a GPT's activations are as wide as their inputs."""
    return LayerBuilder(name, PartSizes(shape, ParallelLayout(tp=tp), 1))


# -- data flow ---------------------------------------------------------------------------------------------


def last_readers(operators: Iterable[Operator]) -> dict[str, str]:
    """Value -> name of the operator that reads it last."""
    return {value: op.name for op in operators for value in op.reads}


def run_symbolically(part: Part, graph: Graph, given: set[str], kept: set[str]) -> set[str]:
    """Run a graph on names alone, freeing every value after its last reader; returns what is left."""
    available = set(given)
    last = last_readers(graph.operators)
    for op in graph.operators:
        missing = set(op.reads) - available
        assert not missing, f"{part.name}: {op.name} reads {missing}, which is not there"
        assert not set(op.writes) & available, f"{op.name} overwrites a value"
        available |= set(op.writes)
        available -= {name for name in op.reads if last[name] == op.name} - kept
        available -= {name for name in op.writes if name not in last} - kept
    return available


def check_data_flow(part: Part) -> None:
    """No pass reads what is not there, all that is saved is read, every input gets one whole gradient."""
    saved, read = set(part.saved()), {name for op in part.backward.operators for name in op.reads}
    left = run_symbolically(part, part.forward, set(part.inputs), {*saved, part.output})
    assert left >= saved
    gradients = {f"d.{name}" for name in part.inputs if name not in part.constants}
    given = {*saved, *part.constants}
    if part.values[part.output].precision is Precision.ACTIVATION:
        given.add(f"d.{part.output}")
        assert saved <= read, "saved for nothing"
    left = run_symbolically(part, part.backward, given, gradients)
    assert gradients <= left
    assert left <= {*gradients, *part.constants}, "the backward pass leaves values behind"
    written = Counter(name for op in both(part) if op.phase is not Phase.RECOMPUTE for name in op.writes)
    assert set(written.values()) <= {1}
    assert gradients <= set(written)
    assert {op.module for op in part.backward.operators} <= {op.own_name for op in part.forward.operators}


# -- gradients -----------------------------------------------------------------------------------------------


def linear_forward(op: Operator, values: dict[str, int], weights: dict[str, int]) -> None:
    """Interpret an operator as y = sum of weight * x."""
    y = sum(weights[f"{op.module}.{n}"] * values[name] for n, name in enumerate(op.reads))
    values.update(dict.fromkeys(op.writes, y))


def linear_backward(op: Operator, values: dict[str, int], weights: dict[str, int]) -> None:
    """The derivative of `linear_forward`; a norm adds the partial gradient that it reads."""
    if op.kind is Kind.ADD:
        values[op.writes[0]] = values[op.reads[0]] + values[op.reads[1]]
        return
    skipped = values[op.reads[3]] if op.kind is Kind.NORM and len(op.reads) == 4 else 0
    for n, name in enumerate(op.writes):
        values[name] = weights[f"{op.module}.{n}"] * values[op.reads[0]] + skipped


def gradient_of(part: Part, weights: dict[str, int]) -> tuple[int, int]:
    """d output / d x of the linear interpretation: by the backward graph, and by a difference."""

    def forward(x: int) -> dict[str, int]:
        values = {"x": x}
        for op in part.forward.operators:
            linear_forward(op, values, weights)
        return values

    values = forward(1)
    expected = values[part.output] - forward(0)[part.output]
    kept = {name: values[name] for name in part.saved()} | {f"d.{part.output}": 1}
    for op in part.backward.operators:
        (linear_forward if op.phase is Phase.RECOMPUTE else linear_backward)(op, kept, weights)
    return kept["d.x"], expected


@st.composite
def random_parts(draw: st.DrawFn) -> Part:
    """Layers in which any value may be read any number of times."""
    g = builder(tp=2)
    values = [g.input()]
    unread = ["x"]

    def pick() -> str:
        name = draw(st.sampled_from(values))
        if name in unread:
            unread.remove(name)
        return name

    for n in range(draw(st.integers(0, 8))):
        kind = draw(
            st.sampled_from(["norm", "gemm", "attention", "activation", "gather", "residual", "custom"])
        )
        name, x = f"{kind}{n}", pick()
        match kind:
            case "norm":
                y = g.norm(name, x)
            case "gemm":
                y = (g.rows if g.dims(x).cut > 1 else g.columns)(name, x, 8)
            case "attention":
                y = g.attention(name, x)
            case "activation":
                y = g.activation(name, x)
            case "gather":
                y = g.gather(name, x)
            case "residual" if (other := pick()) != x:
                y = g.residual(name, x, other)
            case _:
                y = g.custom(name, x, saved_elements=8, flops=3)
        values.append(y)
        unread.append(y)
    y = unread[0]
    for n, other in enumerate(unread[1:]):
        y = g.custom(f"join{n}", y, other, saved_elements=8)
    return g.build(g.activation("last", y))


@given(random_parts(), st.data())
@settings(max_examples=150, deadline=None)
def test_gradients_of_any_graph(part: Part, data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(RECOMPUTE_POLICIES))
    part = with_recompute(part, policy)
    weights = {}
    for op in part.forward.operators:
        for n in range(len(op.reads)):
            weights[f"{op.module}.{n}"] = data.draw(st.integers(-3, 3))
    actual, expected = gradient_of(part, weights)
    assert actual == expected
    saved = set(part.saved())
    left = run_symbolically(part, part.forward, {"x"}, {*saved, part.output})
    assert saved <= left
    assert run_symbolically(part, part.backward, {*saved, f"d.{part.output}"}, {"d.x"}) == {"d.x"}


def test_graphs_that_have_no_gradient_are_refused() -> None:
    g = builder()
    x = g.input()
    with pytest.raises(ValueError, match=r"layer: value gate.out is written twice"):
        g.columns("gate", g.columns("gate", x, 8), 8)
    with pytest.raises(ValueError, match=r"operator double reads the same value twice: x, x"):
        g.residual("double", x, x)
    g = builder()
    x = g.input()
    g.columns("forgotten", x, 8)
    with pytest.raises(ValueError, match=r"forgotten.dgrad needs d.forgotten.out, which no operator writes"):
        g.build(g.norm("norm", x))
    g = builder()
    y = g.norm("norm", g.input())
    g.activation("after", y)
    with pytest.raises(ValueError, match=r"the output norm.out must not be read inside the part"):
        g.build(y)


@pytest.mark.parametrize("name", ["two words", "", "hash#tag", "tab\t"])
def test_operator_names_must_be_words(name: str) -> None:
    g = builder()
    y = g.activation(name, g.input())
    with pytest.raises(ValueError, match="a name is one word without '#'"):
        g.build(y)


# -- sizes ---------------------------------------------------------------------------------------------------


def test_bytes_of_collectives_of_the_head() -> None:
    """Three statistics of each token, from every rank, in four bytes; all of the tokens but a rank's own."""
    head = model_parts(LLAMA, 4)["head"].forward
    assert head.named("loss_gather").bytes == 4 * 3 * TOKENS * 3
    assert head.named("head_gather").bytes == 2 * TOKENS * LLAMA.hidden * 3 // 4


# -- recomputation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "tp", "expected"),
    [
        # Behind a gather, what a norm wrote is not needed again; its statistics are kept.
        ("selective", 1, "attention_norm mlp_norm activation"),
        ("selective", 2, "activation"),
        ("fine", 1, computing(FORWARD).removesuffix(" mlp_out mlp_residual")),
        ("fine", 2, "qkv attention attention_residual mlp_in activation"),
        ("full", 1, computing(FORWARD).removesuffix(" mlp_out mlp_residual")),
        ("full", 2, " ".join(FORWARD.split()).removesuffix(" mlp_out mlp_scatter mlp_residual")),
    ],
)
def test_what_is_recomputed(policy: str, tp: int, expected: str) -> None:
    layer, plain = (model_parts(LLAMA, tp, one)["layer"] for one in (policy, "none"))
    again = [op for op in layer.backward.operators if op.phase is Phase.RECOMPUTE]
    assert tuple(again) == layer.backward.operators[: len(again)], "recomputation comes first"
    assert [op.name for op in again] == [f"{name}.again" for name in expected.split()]
    assert layer.backward.operators[len(again) :] == plain.backward.operators
    assert layer.forward == plain.forward
    assert model_parts(LLAMA, tp, policy)["head"] == model_parts(LLAMA, tp)["head"]
    if policy == "full":
        assert set(layer.saved()) == {"x"}


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train.recompute='some' .* none, selective, full, fine"):
        with_recompute(model_parts()["layer"], "some")


# -- layers that are not built in ----------------------------------------------------------------------------


def test_widths_that_do_not_fit_are_refused() -> None:
    g = builder(tp=2, shape=LLAMA)
    x = g.gather("gather", g.input())
    inner = g.columns("first", x, 32)
    with pytest.raises(ValueError, match=r"second: first\.out is cut over tp; use rows, or gather it first"):
        g.columns("second", inner, 32)
    with pytest.raises(ValueError, match=r"third: gather\.out is not cut over tp; use columns"):
        g.rows("third", x, 32)


def test_a_module_keeps_its_inputs_unless_told_otherwise() -> None:
    g = builder(shape=LLAMA)
    x = g.input()
    y = g.custom("own", g.columns("in", x, 40), x, like=x)
    part = g.build(g.custom("last", y, saved_elements=7, flops=11))
    tokens = LLAMA.sequence
    assert part.values["own.saved"].elements == tokens * (40 + LLAMA.hidden)
    assert part.values["own.out"].elements == tokens * LLAMA.hidden
    assert (part.values["last.saved"].elements, part.forward.named("last").flops) == (7, 11)
