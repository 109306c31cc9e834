"""What hiding communication is worth, to be seen on one machine: ``braid demo``.

The demo's model is trained twice over an emulated slow link: with overlap to the end, and from the same
beginning a short stretch without it. In that stretch both make their steps by turns, so that other work on
the machine slows both alike. Both compute the same, so their losses must agree to the last bit.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from braid.actors.config import Config, ConfigError, load_config
from braid.actors.controller.controller import RunOptions
from braid.actors.controller.ranks.group import StoppedError
from braid.actors.controller.records.run_records import Event, Finished, StepDone
from braid.dashboards.timeline_picture import timeline_svg, timeline_text
from braid.dashboards.trace_folder import TraceFolder
from braid.jobs.training.display import validation_line
from braid.jobs.training.train import Show, training

RECIPE = Path(__file__).parent / "recipes" / "demo.yaml"
STRETCH = 12
"""Steps that are made by turns."""
_SETTLING = 2
"""First steps of a run, which are not compared: memory is touched for the first time."""
PICTURE = "timelines.svg"
_KEPT = 10_000
"""Steps whose spans are read: all."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What came of it, of the run without overlap and of the run with it."""

    seconds: tuple[tuple[float, ...], tuple[float, ...]]
    """Of each step that they made by turns, of its slowest rank; without `_SETTLING`."""
    hidden: tuple[float, float]
    compared: int
    """Steps that both runs made."""
    alike: int
    """Steps whose loss and gradient norm are the same to the last bit in both runs."""
    validation: Mapping[str, float | None]
    """As in the report, of the run with overlap."""
    runs: tuple[Path, Path]

    @property
    def faster(self) -> float:
        """The median of the ratios of the steps that were made next to each other."""
        return median(without / with_ for without, with_ in zip(*self.seconds, strict=True))

    @property
    def typical(self) -> tuple[int, int]:
        """Of each run, the step (from 0) that took its median time, of an even number the longer one."""
        first, second = (sorted(range(len(own)), key=own.__getitem__)[len(own) // 2] for own in self.seconds)
        return first + _SETTLING, second + _SETTLING

    @property
    def sentence(self) -> str:
        hid = f"{self.hidden[1]:.0%} of communication hidden ({self.hidden[0]:.0%} without)"
        steps = f"the {self.compared} steps that both made"
        same = f"same losses to the last bit in {steps}"
        if self.alike < self.compared:
            same = f"a fault: other losses in {self.compared - self.alike} of {steps}"
        return f"{self.faster:.2f}x faster: {hid}; {same}"


def run(show: Callable[[str], None], events: Callable[[Config], Show], overrides: list[str]) -> Demo:
    """Train both; ``events`` makes what takes the events of a run of a configuration."""
    config = load_config(RECIPE, overrides)
    if config.train.steps <= _SETTLING:
        raise ConfigError(
            f"train.steps={config.train.steps} must be more than {_SETTLING}: the first ones are not compared"
        )
    telemetry = config.telemetry.model_copy(update={"page": False})
    changed = {"name": f"{config.name}-without-overlap", "telemetry": telemetry}
    serial = config.with_schedule("megatron").model_copy(update=changed)
    mbit = config.cluster.emulated_link_mbit or 0.0
    show(
        f"two ranks of this machine, each on CPUs of its own, as if joined by a link of {mbit:g} Mbit/s "
        f"(emulated: the kernel paces their connections)"
    )
    show(
        f"\n1. {STRETCH} steps with overlap and {STRETCH} without (schedule megatron), by turns, from one "
        f"beginning\n"
    )
    options, stretch = RunOptions(overwrite=True), min(STRETCH, config.train.steps)
    with (
        closing(training(config, options, events(config))) as overlapped,
        closing(training(serial, replace(options, until=STRETCH), events(serial))) as one_after_another,
    ):
        for _ in range(stretch):
            if not (_next_step(overlapped) and _next_step(one_after_another)):
                break  # stopped by a signal
        without = _rest(one_after_another)
        if len(without["steps"]) < stretch:
            raise StoppedError("the demo was stopped")
        show(f"\n2. the rest of the {config.train.steps} steps, with overlap\n")
        with_ = _rest(overlapped)
    both = list(zip(without["steps"], with_["steps"], strict=False))
    first, second = (tuple(step["seconds"] for step in own[_SETTLING:]) for own in zip(*both, strict=True))
    return Demo(
        seconds=(first, second),
        hidden=(without["overlap"]["hidden_fraction"], with_["overlap"]["hidden_fraction"]),
        compared=len(both),
        alike=sum(all(one[key] == other[key] for key in ("loss", "grad_norm")) for one, other in both),
        validation=with_["validation"],
        runs=(serial.run_directory, config.run_directory),
    )


def _next_step(events: Iterator[Event]) -> bool:
    """Let a run make a step; returns whether it made one."""
    return any(isinstance(event, StepDone) for event in events)


def _rest(events: Iterator[Event]) -> dict[str, Any]:
    """Let a run go on to its end; its report."""
    report: dict[str, Any] = {}
    for event in events:
        if isinstance(event, Finished):
            report = event.report
    return report


def show_demo(console: Console, demo: Demo) -> None:
    """Print timelines and the point; write the picture beside the second run."""
    traces = [TraceFolder.of_run(run, keep=_KEPT) for run in demo.runs]
    names = "without overlap", "with overlap"
    steps = {name: (folder, step) for name, folder, step in zip(names, traces, demo.typical, strict=True)}
    console.print()
    console.print(timeline_text(steps))
    console.print()
    picture = demo.runs[1] / PICTURE
    picture.write_text(timeline_svg(steps, ranks=[0]), encoding="utf-8")
    console.print(f"the same as a picture: {picture}", highlight=False, soft_wrap=True)
    console.print(
        f"every operator of the run: braid dashboard {demo.runs[1]}", highlight=False, soft_wrap=True
    )
    console.print(f"validation: {validation_line(demo.validation)}", highlight=False)
    style = "bold green" if demo.alike == demo.compared else "bold red"
    console.print(Text(demo.sentence, style=style), soft_wrap=True)
