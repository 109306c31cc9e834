"""``braid demo``: shows on one machine the value of hiding communication.

The demo's model is trained twice over an emulated slow link: completely with overlap, and from the same
beginning a short stretch without it. In that stretch both runs make their steps by turns, so that other work
on the machine slows both alike. Both compute the same, so their losses must agree to the last bit.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.text import Text

from braid.actors.config import ConfigError, load_config
from braid.actors.controller.controller import RunOptions
from braid.actors.controller.ranks.group import StoppedError
from braid.actors.controller.records.run_records import Event, StepDone
from braid.dashboards.timeline_picture import timeline_svg, timeline_text
from braid.dashboards.trace_folder import TraceFolder
from braid.jobs.output import say
from braid.jobs.training.display import Display, validation_line
from braid.jobs.training.train import report_of, training
from braid.scheduling.trace.figures import share

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.yaml"
STRETCH = 12
"""Number of steps that the two runs make by turns."""
_SETTLING = 2
"""First steps of a run that are not compared, since memory is touched for the first time."""
PICTURE = "timelines.svg"
_KEPT = 10_000
"""Most steps whose spans are read; more than the demo has."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Results of the demo, of the run without overlap and of the run with it."""

    seconds: tuple[tuple[float, ...], tuple[float, ...]]
    """Seconds of each step that both made, on the slowest rank; without the first `_SETTLING` steps."""
    hidden: tuple[float | None, float | None]
    """Share of communication that was hidden; None without communication."""
    compared: int
    """Number of steps that both runs made."""
    alike: int
    """Number of steps whose loss and gradient norm are bit-identical in both runs."""
    validation: Mapping[str, float | None]
    runs: tuple[Path, Path]

    @property
    def faster(self) -> float:
        """Speed-up: median of the ratios of steps that were made next to each other."""
        return median(without / with_ for without, with_ in zip(*self.seconds, strict=True))

    @property
    def typical(self) -> tuple[int, int]:
        """For each run, the step (from 0) that took the median time; of an even number of steps the slower
        middle one."""
        first, second = (sorted(range(len(own)), key=own.__getitem__)[len(own) // 2] for own in self.seconds)
        return first + _SETTLING, second + _SETTLING

    @property
    def sentence(self) -> str:
        without, with_ = map(share, self.hidden)
        hid = f"{with_} of communication hidden ({without} without)"
        steps = f"the {self.compared} steps that both made"
        same = f"same losses to the last bit in {steps}"
        if self.alike < self.compared:
            same = f"a fault: other losses in {self.compared - self.alike} of {steps}"
        return f"{self.faster:.2f}x faster: {hid}; {same}"


def run(console: Console, overrides: list[str]) -> Demo:
    """Train both models, and show their progress."""
    config = load_config(RECIPE, overrides)
    if config.train.steps <= _SETTLING:
        raise ConfigError(
            f"train.steps={config.train.steps} must be more than {_SETTLING}: the first ones are not compared"
        )
    telemetry = config.telemetry.model_copy(update={"page": False})
    changed = {"name": f"{config.name}-without-overlap", "telemetry": telemetry}
    serial = config.with_schedule("megatron").model_copy(update=changed)
    say(
        console,
        f"two ranks of this machine, each on CPUs of its own, as if joined by a link of "
        f"{config.cluster.emulated_link_mbit or 0.0:g} Mbit/s (emulated: the kernel paces their "
        f"connections)\n\n1. {STRETCH} steps with overlap and {STRETCH} without (schedule megatron), by "
        f"turns, from one beginning\n",
    )
    options, stretch = RunOptions(overwrite=True), min(STRETCH, config.train.steps)
    first, second = (Display(console, live=False).show for _ in range(2))
    with (
        closing(training(config, options, first)) as overlapped,
        closing(training(serial, replace(options, until=STRETCH), second)) as one_after_another,
    ):
        for _ in range(stretch):
            if not (_next_step(overlapped) and _next_step(one_after_another)):
                break  # stopped by a signal
        without = report_of(one_after_another)
        if len(without["steps"]) < stretch:
            raise StoppedError("the demo was stopped")
        say(console, f"\n2. the rest of the {config.train.steps} steps, with overlap\n")
        with_ = report_of(overlapped)
    both = list(zip(without["steps"], with_["steps"], strict=False))
    times = [tuple(step["seconds"] for step in own[_SETTLING:]) for own in zip(*both, strict=True)]
    return Demo(
        seconds=(times[0], times[1]),
        hidden=(without["overlap"]["hidden_fraction"], with_["overlap"]["hidden_fraction"]),
        compared=len(both),
        alike=sum(all(one[key] == other[key] for key in ("loss", "grad_norm")) for one, other in both),
        validation=with_["validation"],
        runs=(serial.run_directory, config.run_directory),
    )


def _next_step(events: Iterator[Event]) -> bool:
    """Let a run make a step; return whether it made one."""
    return any(isinstance(event, StepDone) for event in events)


def show_demo(console: Console, demo: Demo) -> None:
    """Print timelines and the result; write a picture beside the second run."""
    traces = [TraceFolder.of_run(run, keep=_KEPT) for run in demo.runs]
    names = "without overlap", "with overlap"
    steps = {name: (folder, step) for name, folder, step in zip(names, traces, demo.typical, strict=True)}
    console.print("", timeline_text(steps), "", sep="\n")
    picture = demo.runs[1] / PICTURE
    picture.write_text(timeline_svg(steps, ranks=[0]), encoding="utf-8")
    say(
        console,
        f"the same as a picture: {picture}\nevery operator of the run: braid dashboard {demo.runs[1]}\n"
        f"validation: {validation_line(demo.validation)}",
    )
    style = "bold green" if demo.alike == demo.compared else "bold red"
    console.print(Text(demo.sentence, style=style), soft_wrap=True)
