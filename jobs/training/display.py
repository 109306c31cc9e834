"""Shows a run's progress: a live line in a terminal, plain lines elsewhere."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from braid.actors.controller.decisions import SimulatedSchedule
from braid.actors.controller.profiling import Profiled
from braid.actors.controller.ranks.group import StoppedError
from braid.actors.controller.records.run_records import (
    CheckpointSaved,
    Event,
    Finished,
    Incident,
    Started,
    StepDone,
)
from braid.actors.controller.records.step_record import StepRecord
from braid.actors.stage.data.token_files import TRAIN, VALIDATION, DataIndex
from braid.jobs.data.prepare import Preparation, Prepared
from braid.jobs.output import complain, duration, facts_of, say, table_of
from braid.jobs.training.layouts import MeasuredLayout
from braid.jobs.training.train import Compared, PageOpened
from braid.jobs.usage import as_options
from braid.scheduling.trace import figures

_LINE_SECONDS = 2.0
_FAR_OFF = 1.5
"""Ratio of simulated and measured step, in either direction, from which a remark is shown."""
_ETA_STEPS = 20
"""Number of recent steps from whose times the remaining time is estimated."""


def si(value: float) -> str:
    """Format a number with a metric prefix: 12.3k, 4.5M."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{suffix}"
    return f"{value:.0f}"


class Display:
    """Shows the events of one run; use as a context manager around it."""

    def __init__(self, console: Console, *, live: bool, worded: Callable[[str], str] = as_options) -> None:
        """``worded``: rewords messages, which name arguments of `braid.train`."""
        self._console, self._worded = console, worded
        self._failed = False
        self._live = live and console.is_terminal
        self._screen: Live | None = None
        self._losses: list[float] = []
        self._validation = "-"
        self._seconds: deque[float] = deque(maxlen=_ETA_STEPS)
        self._last_line = 0.0
        self._last_step = 0
        """The run's last step; 0 while no ranks have started yet."""

    @contextlib.contextmanager
    def running(self) -> Iterator["Display"]:
        """Keep the live part of the terminal for the length of the block."""
        if not self._live:
            yield self
            return
        with Live(Text("starting"), console=self._console, refresh_per_second=8) as screen:
            self._screen = screen
            yield self

    def on_event(self, event: Any) -> None:
        """Show an event as a callback of a run, which goes on if that fails."""
        try:
            self.show(event)
        except StoppedError:  # a signal that came while the event was shown
            raise
        except Exception as error:
            if not self._failed:
                complain(f"an event cannot be shown ({type(error).__name__}: {error}); training goes on")
            self._failed = True

    def show(self, event: Event | Prepared | Preparation | Profiled | Compared | PageOpened | str) -> None:
        """Show one event."""
        match event:
            case str():
                self._say(event)
            case PageOpened():
                self._say(f"page    {event.address} shows the run live")
            case Preparation():
                tokens = f"{si(event.tokens)} tokens"
                self._update(f"tokenising: {event.items_done}/{event.items} parts, {tokens}")
            case Prepared():
                train, validation = (si(event.index.tokens(split)) for split in (TRAIN, VALIDATION))
                name = f"{event.name}: " if event.name else ""
                self._say(
                    f"data    {name}{train} training and {validation} validation tokens of {event.documents} "
                    f"documents in {event.output}" + (" (prepared before)" if event.reused else "")
                )
                for line in _about_tokens(event.index):
                    self._say(line)
                self._update("starting ranks")
            case Profiled():
                how = "measured before" if event.reused else f"measured in {event.seconds:.0f} s"
                self._say(f"profile {event.path} ({how}; {event.profile.told})")
                self._say("plan    searching what runs beside what (up to a minute)")
            case Compared():
                self._console.print(comparison_table(event.rows))
            case Started():
                self._begin(event)
            case StepDone():
                self._step(event.record)
            case Incident():
                self._say(f"warning {event.text}")
            case CheckpointSaved():
                waited = f", training waited {event.stalled_seconds:.2f} s"
                self._say(f"saved   step {event.step} to {event.path} in {event.seconds:.1f} s{waited}")
            case Finished():
                self._update("")
                self._console.print(report_table(event.report))
                self._say("done" if event.complete else "stopped early; go on with resume=True")

    def _say(self, line: str) -> None:
        say(self._console, self._worded(line))

    def _update(self, text: str) -> None:
        if self._screen:
            self._screen.update(Text(text))

    def _begin(self, event: Started) -> None:
        for note in event.notes:
            self._say(f"warning {note}")
        work = f"steps {event.first_step} to {event.last_step}"
        if event.first_step > event.last_step:
            work = f"step {event.first_step - 1} of {event.last_step} is done: nothing left to do"
        self._say(f"ranks   {event.ranks} ({event.layout}); {work}; records in {event.run_directory}")
        if event.at_risk and not self._last_step:
            self._say(f"safety  {event.at_risk}")
        self._last_step = event.last_step

    def _count(self, record: StepRecord) -> bool:
        """Keep a step's numbers for later ones; return whether a validation followed the step."""
        self._losses.append(record.loss)
        self._seconds.append(record.wall_seconds or record.seconds)
        validated = record.validation_loss is not None
        if validated:
            numbers = {"loss": record.validation_loss, "bits_per_byte": record.validation_bits_per_byte}
            self._validation = validation_line({**numbers, "sets": record.validation_losses})
        return validated

    def _step(self, record: StepRecord) -> None:
        validated = self._count(record)
        facts = self._facts(record)
        if self._screen:
            cells = [Text.assemble((name, "dim"), "\n", (value, "bold")) for name, value in facts.items()]
            bar = ProgressBar(total=self._last_step, completed=record.step)
            self._screen.update(Group(Columns(cells, padding=(0, 2)), bar))
        due = time.monotonic() - self._last_line >= _LINE_SECONDS
        if self._screen or not (due or validated or record.step == self._last_step):
            return
        self._last_line = time.monotonic()
        words = [f"step {facts['step']}", f"loss {facts['loss']}"]
        if validated:
            words.append(f"validation {facts['validation']}")
        else:
            words += [f"{facts['tokens/s']} tokens/s", facts["step time"]]
            if record.communication_seconds and record.seconds:
                words.append(f"comm {facts['communication']}, {facts['hidden']} hidden")
        self._say("  ".join([*words, f"ETA {facts['time left']}"]))

    def _facts(self, record: StepRecord) -> dict[str, str]:
        share = record.communication_seconds / record.seconds if record.seconds else 0.0
        return {
            "step": f"{record.step}/{self._last_step}",
            "loss": f"{record.loss:.4f}",
            "validation": self._validation,
            "tokens/s": si(record.tokens_per_s),
            "step time": f"{record.seconds * 1e3:.0f} ms",
            "communication": f"{share:.0%}",
            "hidden": figures.share(record.hidden_fraction),
            "memory": f"{max(record.peak_bytes) / 2**30:.2f} GiB",
            "time left": duration((self._last_step - record.step) * fmean(self._seconds)),
        }


def _about_tokens(index: DataIndex) -> Iterator[str]:
    """Yield lines about the token that ends documents, and about text that has no tokens."""
    if index.end_token:
        yield f"data    documents end with token {index.end_of_document}, {index.end_token!r}"
    if index.row_tokens:
        share = index.tokens_padded / sum(index.tokens(split) for split in index.splits)
        yield f"data    documents whole in rows of {index.row_tokens} tokens, {share:.1%} padding"
    if left_out := index.documents_long + index.documents_silent:
        yield (
            f"warning {left_out} conversations left out: {index.documents_long} are longer than a row (raise "
            f"model.sequence), {index.documents_silent} have no token of an assistant"
        )
    if index.characters_lost:
        share = index.characters_lost / index.characters
        yield f"warning {index.characters_lost} characters ({share:.2%}) have no token in {index.tokenizer}"
    if index.tokens_unknown:
        share = index.tokens_unknown / sum(index.tokens(split) for split in index.splits)
        yield f"warning {index.tokens_unknown} tokens ({share:.2%}) are what {index.tokenizer} does not know"


def validation_line(validation: Mapping[str, Any]) -> str:
    """Describe the last validation: in nats per token, in bits per byte if that is known, and of each set of
    a mixture."""
    loss, bits = validation["loss"], validation["bits_per_byte"]
    facts = [] if loss is None else [f"{loss:.4f} nats per token"]
    if bits is not None:
        facts.append(f"{bits:.3f} bits per byte")
    facts += [f"{name} {loss:.4f}" for name, loss in validation.get("sets", {}).items() if loss is not None]
    return ", ".join(facts) or "-"


def report_table(report: dict[str, Any]) -> Table:
    """Summarise a finished run in one table."""
    steps, layout, communication = report["steps"], report["layout"], report["communication"]
    seconds = sum(step["seconds"] for step in steps)
    wall = sum(step["wall_seconds"] or step["seconds"] for step in steps)
    ranks = f"{layout['ranks']} ranks ({layout['described']})" if layout["ranks"] > 1 else "one rank"
    between = f"{wall:.1f} s for {len(steps)} steps, {wall - seconds:.1f} of them between steps"
    peaks = ", ".join(f"{peak / 2**30:.2f}" for peak in report["memory"]["peak_bytes"])
    rows = {"layout": f"{ranks}, schedule {layout['schedule']}"}
    if steps:
        rows["loss"] = f"{steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f}"
    rows["validation"] = validation_line(report["validation"])
    rows["speed"] = f"{si(report['tokens_per_s'])} tokens/s, {between}"
    if seconds and communication["seconds"]:
        share, exposed = communication["seconds"] / seconds, communication["exposed_seconds"]
        rows["communication"] = (
            f"{share:.0%} of the time, {exposed / communication['seconds']:.0%} of it exposed"
        )
    if (overlap := report["overlap"]) and overlap["communication_seconds"]:
        rows["overlap"] = overlap_line(overlap)
    if prediction := report.get("prediction"):
        rows["prediction"] = prediction_line(prediction)
    if experts := report.get("experts"):
        rows["experts"] = experts_line(experts["last"])
    rows["peak memory"] = f"{peaks} GiB (by rank)"
    return facts_of(rows, "report")


def overlap_line(overlap: dict[str, Any]) -> str:
    """Summarise overlap per step in one line."""
    facts = [f"{figures.share(overlap['hidden_fraction'])} of communication hidden"]
    for name in ("waiting", "slowdown", "launch_gap", "bubble"):
        if (seconds := overlap[f"{name}_seconds"]) is None:
            continue
        words = "waiting for a peer" if name == "waiting" else name.replace("_", " ")
        facts.append(f"{words} {seconds * 1e3:.1f} ms")
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
    """Compare the simulated with the measured step, and explain what it means if they differ much."""
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
    """Describe how a step distributed tokens over experts, in one line."""
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


def comparison_table(rows: Sequence[SimulatedSchedule] | Sequence[MeasuredLayout]) -> Table:
    """Show what a choice of ``auto`` was based on: simulated steps, the fastest first."""
    schedules = isinstance(rows[0], SimulatedSchedule)
    how = "schedules, simulated with the measured profile" if schedules else "layouts, simulated as measured"
    texts = ("schedule",) if schedules else ("layout", "schedule")
    numbers = ("s/step", "ratio", *(("hidden", "bubble", "GiB", "unit") if schedules else ()))
    table = table_of(f"{how}; the first runs", texts, numbers)
    for column in table.columns[: len(texts)]:
        column.no_wrap, column.min_width = schedules, 14
    fastest = rows[0].seconds
    assert fastest is not None
    for row in rows:
        seconds = ("-", "-")
        if row.seconds is not None:
            seconds = f"{row.seconds:.4f}", f"{row.seconds / fastest:.3f}"
        if isinstance(row, SimulatedSchedule):
            shares = figures.share(row.hidden_fraction), figures.share(row.bubble_fraction)
            memory = f"{row.peak_bytes / 2**30:.2f}"
            table.add_row(row.schedule, *seconds, *shares, memory, str(row.unit_layers or "-"))
        else:
            trouble = f"({row.trouble})" if row.schedule and row.trouble else row.trouble
            table.add_row(row.layout, f"{row.schedule} {trouble}".strip(), *seconds)
    return table
