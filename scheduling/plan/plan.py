"""Plan: few, symbolic decisions that a person can read and edit, with the costs of the runners-up.

A plan is YAML. `braid.scheduling.plan.decide` makes plans and lowers them to a `Schedule` again; it refuses a
wrong edit with the wrong key.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from braid.scheduling.cost.simulate import Numbers
from braid.scheduling.generate.lower import Choices
from braid.scheduling.generate.named import PairMethod, schedule_trouble
from braid.scheduling.generate.setting import Setting
from braid.scheduling.text.records import file_text, from_mapping, to_mapping
from braid.scheduling.text.yaml_text import parse_yaml, write_yaml

VERSION: Final = 6


@dataclass(frozen=True, kw_only=True)
class PairingNote:
    """Times in ns of the method chosen to overlap a forward and a backward pass, and of the next best
    method."""

    method: PairMethod
    ns: int
    serial_ns: int
    lower_bound_ns: int
    """Time of the busiest stream's operators in ns; no order is faster."""
    runner_up: str
    runner_up_ns: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """Metrics of a plan's simulated step."""

    step_seconds: float
    tokens_per_second: float
    mfu: float
    hidden_fraction: float
    exposed_seconds: float
    bubble_fraction: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """A setting that was tried and not taken, with its simulated or estimated step, and the reason."""

    layout: str
    schedule: str
    micro_batch: int
    recompute: str
    step_seconds: float
    peak_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run's plan: all decisions that determine its schedule (``setting``, ``choices``), and their
    scores."""

    cluster: str
    profile: str
    """Text that says where the costs come from."""
    setting: Setting
    choices: Choices
    score: Score
    pairing: PairingNote | None = None
    runners_up: tuple[RunnerUp, ...] = ()
    usual: tuple[RunnerUp, ...] = ()
    """Results of other systems' schedules with the same parallel degrees, quickest first."""
    braid_plan: int = VERSION

    @property
    def not_executed(self) -> tuple[str, ...]:
        """Descriptions of what the plan's setting asks for and the executor cannot run; empty if all runs."""
        return ("fewer layers on the stage with the head",) if self.setting.layout.head_layers else ()

    def to_yaml(self) -> str:
        """Return the plan as YAML that `parse_plan` reads back to an equal object."""
        content = to_mapping(self)
        ordered = {"braid_plan": content.pop("braid_plan"), **content}
        return write_yaml(ordered, width=100)


def score_of(numbers: Numbers) -> Score:
    """Return those metrics of a simulated step that a plan stores."""
    values = {field.name: getattr(numbers, field.name) for field in fields(Score)}
    return Score(**{**values, "mfu": numbers.mfu or 0.0})


def parse_plan(text: str, where: str) -> Plan:
    """Parse a plan from YAML text that comes from ``where``.

    Raises `ValueError` that names the wrong key, its value and the remedy.
    """
    content = parse_yaml(text, where)
    if not isinstance(content, dict) or "braid_plan" not in content:
        raise ValueError(f"{where} is no plan: the key braid_plan is missing; make one with `braid plan`")
    if (version := content["braid_plan"]) != VERSION:
        raise ValueError(
            f"{where}: braid_plan={version} is not version {VERSION}; make the plan anew with `braid plan`"
        )
    setting = content.get("setting")
    name = setting.get("schedule") if isinstance(setting, dict) else None
    if isinstance(name, str) and (trouble := schedule_trouble(name)):
        raise ValueError(f"{where}.setting.schedule={name!r} {trouble}")
    return from_mapping(Plan, content, where)


def read_plan(path: Path) -> Plan:
    """Read a plan from a YAML file; raise `ValueError` that names the file and a remedy if it cannot be
    read."""
    return parse_plan(file_text(path, "plan", "make one with `braid plan --output`"), str(path))
