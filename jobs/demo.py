"""What hiding communication is worth, to be seen on one machine: ``braid demo``.

The demo's model is trained twice over an emulated slow link: a short stretch without overlap, then from the
same beginning to the end with it. Both compute the same, so their losses must agree to the last bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from braid.actors.config import Config, load_config
from braid.actors.controller.controller import RunOptions
from braid.dashboards.timeline_picture import comparison_png
from braid.dashboards.timeline_text import timeline_text
from braid.dashboards.trace_folder import TraceFolder
from braid.jobs.display import validation_line
from braid.jobs.train import Show, train

RECIPE = Path(__file__).parent / "recipes" / "demo.yaml"
STRETCH = 12
"""Steps without overlap."""
_SETTLING = 2
"""First steps of a run, which are not compared: memory is touched for the first time."""
PICTURE = "timelines.png"


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What came of it: seconds of a step and the share of communication that was hidden, without and with."""

    seconds: tuple[float, float]
    hidden: tuple[float, float]
    compared: int
    """Steps that both runs made."""
    alike: int
    """Those of them whose loss and gradient norm are the same to the last bit."""
    validation: Mapping[str, float | None]
    """As in the report."""
    link_mbit: float
    runs: tuple[Path, Path]

    @property
    def sentence(self) -> str:
        """The point of it."""
        without, with_ = self.seconds
        hid = f"{self.hidden[1]:.0%} of communication hidden ({self.hidden[0]:.0%} without)"
        steps = f"the {self.compared} steps that both made"
        same = f"same losses to the last bit in {steps}"
        if self.alike < self.compared:
            same = f"a fault: other losses in {self.compared - self.alike} of {steps}"
        return f"{without / with_:.2f}x faster: {hid}; {same}"


def run(show: Callable[[str], None], events: Callable[[Config], Show], overrides: list[str]) -> Demo:
    """Train both; ``events`` makes what takes the events of a run of a configuration."""
    config = load_config(RECIPE, overrides)
    serial = config.with_schedule("megatron").model_copy(update={"name": f"{config.name}-without-overlap"})
    mbit = config.cluster.emulated_link_mbit or 0.0
    show(
        f"two ranks of this machine, each on CPUs of its own, as if joined by a link of {mbit:g} Mbit/s "
        f"(emulated: the kernel paces their connections)"
    )
    show(f"\n1. {STRETCH} steps without overlap (schedule megatron)\n")
    reports = [train(serial, RunOptions(overwrite=True, until=STRETCH), events(serial))]
    show(f"\n2. from the same beginning, {config.train.steps} steps with overlap\n")
    reports.append(train(config, RunOptions(overwrite=True), events(config)))
    steps = [report["steps"] for report in reports]
    both = list(zip(*steps, strict=False))
    return Demo(
        seconds=_pair([median(step["seconds"] for step in own[_SETTLING:]) for own in steps]),
        hidden=_pair([report["overlap"]["hidden_fraction"] for report in reports]),
        compared=len(both),
        alike=sum(_result(first) == _result(second) for first, second in both),
        validation=reports[1]["validation"],
        link_mbit=mbit,
        runs=(serial.run_directory, config.run_directory),
    )


def _pair(values: list[float]) -> tuple[float, float]:
    first, second = values
    return first, second


def _result(step: dict[str, Any]) -> tuple[float, float]:
    return step["loss"], step["grad_norm"]


def show_demo(console: Console, demo: Demo) -> None:
    """Print timelines and the point; write the picture beside the second run."""
    traces = [TraceFolder(run / "trace") for run in demo.runs]
    for one in traces:
        one.refresh()
    steps = {
        name: (one, one.steps[-1])
        for name, one in zip(("without overlap", "with overlap"), traces, strict=True)
    }
    console.print()
    console.print(timeline_text(steps))
    console.print()
    try:
        picture = demo.runs[1] / PICTURE
        picture.write_bytes(comparison_png(steps, ranks=[0]))
        console.print(f"the same as a picture: {picture}", highlight=False, soft_wrap=True)
    except ValueError as error:  # without matplotlib
        console.print(f"no picture: {error}", highlight=False, soft_wrap=True)
    console.print(
        f"every operator of the run: braid dashboard {demo.runs[1]}", highlight=False, soft_wrap=True
    )
    console.print(f"validation: {validation_line(demo.validation)}", highlight=False)
    style = "bold green" if demo.alike == demo.compared else "bold red"
    console.print(Text(demo.sentence, style=style), soft_wrap=True)
