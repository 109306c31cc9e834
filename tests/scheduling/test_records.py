"""Records from and to mappings: they round-trip, and what is wrong is one message with key, value, remedy."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.cost.analytic import analytic_profile
from braid.scheduling.cost.profile import parse_profile
from braid.scheduling.mesh.cluster import ClusterSpec
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.presets.library import cluster_preset
from braid.scheduling.text.records import from_mapping, require_fraction, require_positive, to_mapping
from braid.scheduling.text.yaml_text import parse_yaml, write_yaml
from tests.scheduling.cases import model_parts


class Colour(StrEnum):
    """An enumeration of texts."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A record inside another."""

    radius: float
    spokes: int = 8

    def __post_init__(self) -> None:
        require_positive(self, ("radius",))
        require_positive(self, ("spokes",), zero=True)


@dataclass(frozen=True, kw_only=True)
class Cart:
    """A record with a field of every kind."""

    name: str
    wheel: Wheel
    weight: float
    count: int
    painted: bool = False
    colour: Colour = Colour.RED
    spare: Wheel | None = None
    sizes: tuple[int, ...] = ()
    box: tuple[float, float] = (1.0, 1.0)
    loads: Mapping[str, float] = field(default_factory=dict)
    share: float = 1.0

    def __post_init__(self) -> None:
        require_fraction(self, ("share",))


GOOD: dict[str, Any] = {"name": "cart", "wheel": {"radius": 0.5}, "weight": 10, "count": 2}


def cart(**changes: Any) -> Cart:
    """A cart from a mapping."""
    return from_mapping(Cart, {**GOOD, **changes}, "cart.yaml")


def refused(content: Any) -> str:
    """The message with which a mapping is refused; one line."""
    with pytest.raises(ValueError) as error:
        from_mapping(Cart, content, "cart.yaml")
    assert "\n" not in str(error.value)
    return str(error.value)


# -- what is read ------------------------------------------------------------------------------------------


def test_defaults_and_conversions() -> None:
    assert cart() == Cart(name="cart", wheel=Wheel(radius=0.5), weight=10.0, count=2)
    assert isinstance(cart().weight, float)
    lists = {"sizes": [1, 2], "box": [3, 4.5], "loads": {"sand": 2}}
    full = cart(painted=True, colour="blue", spare={"radius": 1, "spokes": 0}, count=3.0, **lists)
    assert (full.painted, full.colour, full.sizes, full.box) == (True, Colour.BLUE, (1, 2), (3.0, 4.5))
    assert full.spare == Wheel(radius=1.0, spokes=0)
    assert full.loads == {"sand": 2.0}
    assert isinstance(full.count, int)
    assert cart(spare=None).spare is None


@pytest.mark.parametrize("text", ["32e9", "1_000", "4e+5", "1.5"])
def test_numbers_of_yaml(text: str) -> None:
    """To YAML 1_000 is a text."""
    loaded = parse_yaml(f"weight: {text}", "cart.yaml")["weight"]
    assert cart(weight=loaded).weight == float(text.replace("_", ""))
    if float(text.replace("_", "")).is_integer():
        assert cart(count=loaded).count == int(float(text.replace("_", "")))


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": math.nan}, "cart.yaml.weight=nan must be a finite number"),
        ({"weight": "heavy"}, "cart.yaml.weight='heavy' must be a number"),
        ({"weight": "1e999"}, "cart.yaml.weight=inf must be a finite number"),
        ({"weight": True}, "cart.yaml.weight=True must be a number"),
        ({"count": 1.5}, "cart.yaml.count=1.5 must be a whole number"),
        ({"count": False}, "cart.yaml.count=False must be a whole number"),
        ({"name": 7}, "cart.yaml.name=7 must be text; write it in quotes"),
        ({"painted": "yes"}, "cart.yaml.painted='yes' must be true or false"),
        ({"colour": "green"}, "cart.yaml.colour='green' must be one of red, blue"),
        ({"sizes": 3}, "cart.yaml.sizes=3 must be a list"),
        ({"sizes": [1, "x"]}, "cart.yaml.sizes[1]='x' must be a whole number"),
        ({"box": [1.0]}, "cart.yaml.box=[1.0] must have 2 entries"),
        ({"loads": {"sand": "much"}}, "cart.yaml.loads.sand='much' must be a number"),
        ({"loads": {1: 2.0}}, "cart.yaml.loads=1 must be text; write it in quotes"),
        ({"name": ...}, "cart.yaml.name is missing; give it text"),
        ({"wheel": None}, "cart.yaml.wheel must hold keys and values, found None"),
        ({"wheel": {}}, "cart.yaml.wheel.radius is missing; give it a number"),
        ({"wheel": {"radius": 0}}, "cart.yaml.wheel: radius=0.0 must be greater than zero"),
        ({"spare": {"radius": 1, "spokes": -1}}, "cart.yaml.spare: spokes=-1 must be zero or more"),
        ({"wheel": {"radius": 1, "a": 3}}, "cart.yaml.wheel: unknown key 'a'; known here: radius, spokes"),
        ({"weigth": 3}, "cart.yaml: unknown key 'weigth'; did you mean 'weight'?"),
        ({"share": 0}, "cart.yaml: share=0.0 must be above 0 and at most 1"),
    ],
)
def test_wrong_values(changes: dict[str, Any], message: str) -> None:
    assert refused({key: value for key, value in {**GOOD, **changes}.items() if value is not ...}) == message


def test_what_is_no_mapping() -> None:
    assert refused([GOOD]) == f"cart.yaml must hold keys and values, found {[GOOD]!r}"


def test_other_refusals() -> None:
    assert refused({**GOOD, "zzz": 1}).startswith("cart.yaml: unknown key 'zzz'; known here: name, wheel, ")
    assert refused({**GOOD, 5: 1}).startswith("cart.yaml: unknown key 5; known here: ")
    assert refused({**GOOD, "weight": 10**400}).endswith("must be a finite number")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*GOOD, "spare", "sizes", "box", "loads", "colour", "x"]), JSON))
def test_nothing_but_value_errors(changes: dict[str, Any]) -> None:
    try:
        made = from_mapping(Cart, {**GOOD, **changes}, "cart.yaml")
    except ValueError:
        assert refused({**GOOD, **changes}).startswith("cart.yaml")
    else:
        assert from_mapping(Cart, to_mapping(made), "again") == made


# -- round trips -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a800", "a100x8"])
def test_clusters_and_profiles_round_trip(name: str) -> None:
    cluster = cluster_preset(name)
    content = to_mapping(cluster)
    assert from_mapping(ClusterSpec, content, "cluster.json") == cluster
    assert from_mapping(ClusterSpec, json.loads(json.dumps(content)), "cluster.json") == cluster
    text = write_yaml(content)
    assert from_mapping(ClusterSpec, parse_yaml(text, "cluster.yaml"), "cluster.yaml") == cluster
    profile = analytic_profile(cluster, ParallelLayout(tp=2), model_parts(tp=2))
    assert parse_profile(profile.to_json(), "profile.json") == profile
