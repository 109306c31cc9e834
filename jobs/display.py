"""What a person sees while a run goes on: a live progress line in a terminal, plain lines elsewhere."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from braid.actors.controller.decisions import Candidate
from braid.actors.controller.profiling import Profiled
from braid.actors.controller.records import Event, Finished, Incident, Saved, Started, StepDone
from braid.actors.controller.step_record import StepRecord
from braid.actors.stage.data import TRAIN, VALIDATION, DataIndex
from braid.jobs.data.prepare import Preparation, Prepared
from braid.jobs.layouts import MeasuredLayout
from braid.jobs.train import Chosen, LayoutsMeasured, PageOpened, Profiling
from braid.scheduling import figures

_CURVE = "▁▂▃▄▅▆▇█"
_LINE_SECONDS = 2.0
_FAR_OFF = 1.5
"""A simulated step that is so many times the measured one, or the other way round, is remarked on."""
_ETA_STEPS = 20
"""Steps whose time says how long those that are left will take."""


def si(value: float) -> str:
    """A number with a metric prefix: 12.3k, 4.5M."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{suffix}"
    return f"{value:.0f}"


class Display:
    """Shows the events of one run; use as a context manager around it."""

    def __init__(self, console: Console, *, live: bool) -> None:
        self._console = console
        self._live = live and console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: Any = None
        self._losses: list[float] = []
        self._validation: str = "-"
        self._seconds: deque[float] = deque(maxlen=_ETA_STEPS)
        self._screen: Live | None = None
        self._last_line = 0.0
        self._last_step = 0

    @contextlib.contextmanager
    def running(self) -> Iterator["Display"]:
        """Hold the live part of the terminal."""
        if not self._live:
            yield self
            return
        with Live(Text("starting"), console=self._console, refresh_per_second=8) as screen:
            self._screen = screen
            yield self

    def show(
        self,
        event: Event | Prepared | Preparation | Profiling | Profiled | Chosen | LayoutsMeasured | PageOpened,
    ) -> None:
        """Take note of an event."""
        match event:
            case Preparation():
                if self._screen:
                    self._screen.update(
                        Text(f"tokenising: {event.items_done}/{event.items} parts, {si(event.tokens)} tokens")
                    )
            case Prepared():
                train, validation = (si(event.index.tokens(split)) for split in (TRAIN, VALIDATION))
                self._say(
                    f"data    {train} training and {validation} validation tokens of {event.documents} "
                    f"documents in {event.output}" + (" (prepared before)" if event.reused else "")
                )
                for line in _of_text(event.index):
                    self._say(line)
                if self._screen:
                    self._screen.update(Text("starting ranks"))
            case Profiling():
                what = event.layout or "operators alone and beside communication"
                self._say(f"profile measuring {what} (once, under a minute)")
            case Profiled():
                how = "measured before" if event.reused else f"measured in {event.seconds:.0f} s"
                self._say(f"profile {event.path} ({how}; {event.profile.told})")
                self._say("plan    searching what runs beside what (up to a minute)")
            case LayoutsMeasured():
                self._console.print(layouts_table(event.layouts))
            case Chosen():
                self._console.print(candidates_table(event.candidates))
            case Started():
                self._begin(event)
            case StepDone():
                self._step(event.record)
            case PageOpened():
                self._say(f"page    {event.url} shows the run live")
            case Incident():
                self._say(f"warning {event.text}")
            case Saved():
                waited = f", training waited {event.stalled_seconds:.2f} s"
                self._say(f"saved   step {event.step} to {event.path} in {event.seconds:.1f} s{waited}")
            case Finished():
                self._finish(event)

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _begin(self, event: Started) -> None:
        for note in event.notes:
            self._say(f"warning {note}")
        work = f"steps {event.first_step} to {event.last_step}"
        if event.first_step > event.last_step:
            work = f"step {event.first_step - 1} of {event.last_step} is done: nothing left to do"
        self._say(f"ranks   {event.ranks} ({event.layout}); {work}; records in {event.run_directory}")
        if event.at_risk and self._task is None:
            self._say(f"safety  {event.at_risk}")
        if self._task is None:
            self._task = self._progress.add_task("training", total=event.last_step)
        self._progress.update(self._task, completed=event.first_step - 1)
        self._last_step = event.last_step

    def _step(self, record: StepRecord) -> None:
        self._losses.append(record.loss)
        self._seconds.append(record.wall_seconds or record.seconds)
        if record.validation_loss is not None:
            self._validation = validation_line(
                {"loss": record.validation_loss, "bits_per_byte": record.validation_bits_per_byte}
            )
        self._progress.update(self._task, completed=record.step)
        if self._screen:
            self._screen.update(Group(self._numbers(record), self._progress))
        elif self._due(record):
            self._say(self._line(record))

    def _due(self, record: StepRecord) -> bool:
        """Plain lines at most every two seconds, but always for the last step and for validations."""
        now = time.monotonic()
        important = record.step == self._last_step or record.validation_loss is not None
        if not important and now - self._last_line < _LINE_SECONDS:
            return False
        self._last_line = now
        return True

    def _facts(self, record: StepRecord) -> list[tuple[str, str]]:
        share = record.communication_seconds / record.seconds if record.seconds else 0.0
        return [
            ("step", f"{record.step}/{self._last_step}"),
            ("loss", f"{record.loss:.4f}"),
            ("validation", self._validation),
            ("tokens/s", si(record.tokens_per_s)),
            ("step time", f"{record.seconds * 1e3:.0f} ms"),
            ("communication", f"{share:.0%}"),
            ("hidden", f"{record.hidden_fraction:.0%}" if record.communication_seconds else "-"),
            ("memory", f"{max(record.peak_bytes) / 2**30:.2f} GiB"),
        ]

    def _line(self, record: StepRecord) -> str:
        """A step in one line of at most 100 columns."""
        facts = [f"step {record.step}/{self._last_step}", f"loss {record.loss:.4f}"]
        share = record.communication_seconds
        if record.validation_loss is not None:
            facts.append(f"validation {self._validation}")
        else:
            facts += [f"{si(record.tokens_per_s)} tokens/s", f"{record.seconds * 1e3:.0f} ms"]
            if share and record.seconds:
                facts.append(f"comm {share / record.seconds:.0%}, {record.hidden_fraction:.0%} hidden")
        left = (self._last_step - record.step) * sum(self._seconds) / len(self._seconds)
        return "  ".join([*facts, f"ETA {duration(left)}"])

    def _numbers(self, record: StepRecord) -> Group:
        """Names above values, in as many rows as the terminal's width needs."""
        facts = [(name, Text(value, style="bold")) for name, value in self._facts(record)]
        facts.append(("loss curve", Text(curve(self._losses), style="cyan")))
        rows: list[list[tuple[str, Text]]] = [[]]
        room = self._console.width
        for name, value in facts:
            width = max(len(name), value.cell_len) + 2
            if rows[-1] and width > room:
                rows.append([])
                room = self._console.width
            room -= width
            rows[-1].append((name, value))
        return Group(*map(_grid, rows))

    def _finish(self, event: Finished) -> None:
        report = event.report
        if self._screen:
            self._screen.update(Text(""))
        self._console.print(report_table(report, self._losses))
        self._say("done" if event.complete else "stopped early; go on with --resume")


def _of_text(index: DataIndex) -> Iterator[str]:
    """Which token ends documents, and what of the text is not in the tokens."""
    if index.end_token:
        yield f"data    documents end with token {index.end_of_document}, {index.end_token!r}"
    if index.characters_lost:
        share = index.characters_lost / index.characters
        yield f"warning {index.characters_lost} characters ({share:.2%}) have no token in {index.tokenizer}"
    if index.tokens_unknown:
        share = index.tokens_unknown / sum(index.tokens(split) for split in index.splits)
        yield f"warning {index.tokens_unknown} tokens ({share:.2%}) are what {index.tokenizer} does not know"


def _grid(facts: Sequence[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in facts:
        table.add_column(no_wrap=True)
    table.add_row(*(Text(name, style="dim") for name, _ in facts))
    table.add_row(*(value for _, value in facts))
    return table


def duration(seconds: float) -> str:
    """Hours, minutes and seconds; of more than four days, the days: 0:01:23, 12 d."""
    whole = round(seconds)
    if whole >= 100 * 3600:
        return f"{whole / 86400:.0f} d"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def curve(values: Sequence[float], width: int = 32) -> str:
    """A series as a line of blocks, averaged into ``width`` columns; an x where no value is a number."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [round(n * len(values) / columns) for n in range(columns + 1)]
    known = [[value for value in values[a:b] if math.isfinite(value)] for a, b in pairwise(edges)]
    means = [fmean(column) if column else None for column in known]
    low, high = (end((mean for mean in means if mean is not None), default=0.0) for end in (min, max))
    scale = (len(_CURVE) - 1) / (high - low) if high > low else 0.0
    return "".join("x" if mean is None else _CURVE[round((mean - low) * scale)] for mean in means)


def validation_line(validation: Mapping[str, float | None]) -> str:
    """What a report says of the last validation: in nats as the loss is, and in bits where that is known."""
    loss, bits = validation["loss"], validation["bits_per_byte"]
    facts = [] if loss is None else [f"{loss:.4f} nats per token"]
    if bits is not None:
        facts.append(f"{bits:.3f} bits per byte")
    return ", ".join(facts) or "-"


def report_table(report: dict[str, Any], losses: list[float]) -> Table:
    """The end of a run in one table."""
    table = Table(title="report", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    steps, layout, communication = report["steps"], report["layout"], report["communication"]
    seconds = sum(step["seconds"] for step in steps)
    wall = sum(step["wall_seconds"] or step["seconds"] for step in steps)
    ranks = f"{layout['ranks']} ranks ({layout['described']})" if layout["ranks"] > 1 else "one rank"
    table.add_row("layout", f"{ranks}, schedule {layout['schedule']}")
    if steps:
        table.add_row("loss", f"{steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f}  {curve(losses)}")
    table.add_row("validation", validation_line(report["validation"]))
    between = f"{wall:.1f} s for {len(steps)} steps, {wall - seconds:.1f} of them between steps"
    table.add_row("speed", f"{si(report['tokens_per_s'])} tokens/s, {between}")
    if seconds:
        exposed = communication["exposed_seconds"]
        table.add_row(
            "communication",
            f"{communication['seconds'] / seconds:.0%} of the time, "
            f"{exposed / communication['seconds'] if communication['seconds'] else 0:.0%} of it exposed",
        )
    if (overlap := report["overlap"]) and overlap["communication_seconds"]:
        table.add_row("overlap", overlap_line(overlap))
    if prediction := report.get("prediction"):
        table.add_row("prediction", prediction_line(prediction))
    if experts := report.get("experts"):
        table.add_row("experts", experts_line(experts["last"]))
    peaks = ", ".join(f"{peak / 2**30:.2f}" for peak in report["memory"]["peak_bytes"])
    table.add_row("peak memory", f"{peaks} GiB (by rank)")
    return table


def overlap_line(overlap: dict[str, Any]) -> str:
    """What overlap came to, per step, in one line."""
    facts = [f"{figures.share(overlap['hidden_fraction'])} of communication hidden"]
    names = {"waiting": "waiting for a peer", "slowdown": "slowdown", "launch_gap": "launch gap"}
    for name, told in {**names, "bubble": "bubble"}.items():
        if (seconds := overlap[f"{name}_seconds"]) is not None:
            facts.append(f"{told} {seconds * 1e3:.1f} ms")
            if name == "slowdown" and figures.lost(seconds, lambda s: f"{s * 1e3:.1f}") == "none":
                facts[-1] = "no slowdown that can be told"
    if overlap["alpha"] is not None:
        facts.append(f"alpha {overlap['alpha']:.2f}, limit {overlap['limit_speedup']:.2f}x")
    won = figures.recovered(overlap["recovered"])
    if won == "none":
        longer = -overlap["recovered"] * (1 - 1 / overlap["limit_speedup"])
        by = f": steps are {longer:.0%} longer than the profile's without overlap" if longer >= 0.005 else ""
        facts.append(f"none of it won{by}")
    elif won != "-":
        facts.append(f"{won} of it recovered")
    return ", ".join(facts)


def prediction_line(prediction: dict[str, float]) -> str:
    """A step as it was simulated and as it was, and what it means that they are far apart."""
    simulated, measured = prediction["step_seconds"], prediction["measured_seconds"]
    facts = f"{simulated * 1e3:.0f} ms a step simulated, {measured * 1e3:.0f} ms measured (median)"
    off = max(simulated, measured) / max(min(simulated, measured), 1e-9)
    if off < _FAR_OFF:
        return facts
    return (
        f"{facts}: {off:.1f} x off, so that what was chosen by simulation may not be the best here; profile "
        f"again with `braid profile --anew` while nothing else runs on these machines"
    )


def experts_line(numbers: dict[str, Any]) -> str:
    """How a step spread tokens over experts, in one line."""
    fullest, worst = numbers["imbalance"], numbers["worst_imbalance"]
    facts = [
        f"fullest {fullest:.2f} x the average ({worst:.2f} in the worst layer)",
        f"entropy {numbers['entropy']:.1%} of a balanced load's",
    ]
    if (ranks := numbers["rank_imbalance"]) is not None:
        facts.append(f"fullest rank {ranks:.2f} x the average")
    if (dropped := numbers["dropped"]) is not None:
        facts.append(f"{dropped:.1%} of visits dropped")
    if unvisited := numbers["unvisited"]:
        facts.append(f"{unvisited} without any visit")
    return f"{', '.join(facts)} (last step)"


def layouts_table(layouts: Sequence[MeasuredLayout]) -> Table:
    """What ``parallel: auto`` decided by: each layout with its best schedule, the fastest first."""
    table = Table(title="layouts, simulated as measured; the first runs", title_justify="left")
    for name in ("layout", "schedule"):
        table.add_column(name, min_width=14)
    for name in ("s/step", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    first = layouts[0].seconds
    assert first is not None
    for one in layouts:
        if one.seconds is None:
            table.add_row(one.layout, one.trouble, "-", "-")
        else:
            schedule = f"{one.schedule} ({one.trouble})" if one.trouble else one.schedule
            table.add_row(one.layout, schedule, f"{one.seconds:.4f}", f"{one.seconds / first:.3f}")
    return table


def candidates_table(candidates: Sequence[Candidate]) -> Table:
    """What ``overlap.schedule: auto`` decided by: simulated with the measured profile, the fastest first."""
    table = Table(
        title="schedules, simulated with the measured profile; the first runs", title_justify="left"
    )
    table.add_column("schedule", no_wrap=True)
    for name in ("s/step", "ratio", "hidden", "bubble", "GiB", "unit"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in candidates:
        table.add_row(
            one.schedule,
            f"{one.seconds:.4f}",
            f"{one.seconds / candidates[0].seconds:.3f}",
            figures.share(one.hidden_fraction),
            figures.share(one.bubble_fraction),
            f"{one.peak_bytes / 2**30:.2f}",
            str(one.unit_layers or "-"),
        )
    return table
