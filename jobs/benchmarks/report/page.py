"""The report as JSON and as Markdown."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from braid.jobs.benchmarks.report.findings import Finding, Number, Verdict
from braid.jobs.benchmarks.report.parts import Ran, ends

_FORMAT: Final = 1
_SIGNS: Final = {Verdict.PASSED: "passed", Verdict.FAILED: "**FAILED**", Verdict.NOT_MEASURED: "not measured"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """All parts that were run."""

    date: str
    device: str
    quick: bool
    seed: int
    minutes: float
    seconds: float
    parts: Sequence[Ran]

    @property
    def findings(self) -> list[Finding]:
        """All verdicts, failures of parts first."""
        return [*ends(self.parts), *(one for ran in self.parts for one in ran.findings)]

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """How many verdicts there are of each kind."""
        return Counter(one.verdict for one in self.findings)

    @property
    def failed(self) -> bool:
        """Whether any claim does not hold."""
        return self.counts[Verdict.FAILED] > 0

    @property
    def stand_in(self) -> str:
        """What the report must not be taken for; empty for a real one."""
        if self.device == "cpu":
            return (
                "This is a stand-in on a CPU: it shows that the report can be made. Its times mean nothing; "
                "streams, CUDA graphs, NCCL, sanitizers and compiled kernels were not measured."
            )
        return "Made with --quick: everything is tiny, so nothing was timed." if self.quick else ""

    @property
    def machine(self) -> Mapping[str, Any]:
        """What the report was made on, as far as it could be told."""
        return next((ran.written.data for ran in self.parts if ran.part.name == "machine"), {})

    def as_json(self) -> dict[str, Any]:
        """Plain containers."""
        content = {
            "format": _FORMAT,
            "date": self.date,
            "stand_in": self.stand_in,
            "device": self.device,
            "quick": self.quick,
            "seed": self.seed,
            "minutes": self.minutes,
            "seconds": round(self.seconds, 1),
            "verdict": str(Verdict.FAILED if self.failed else Verdict.PASSED),
            "counts": {str(verdict): self.counts[verdict] for verdict in Verdict},
            "machine": self.machine,
            "claims": [asdict(one) for one in self.findings],
            "parts": [_part_json(ran) for ran in self.parts],
        }
        return {key: _finite(value) for key, value in content.items()}

    def as_markdown(self) -> str:
        """For people."""
        lines = ["# Braid on this machine's GPUs", "", *self._head(), "", "## Claims", "", *self._claims()]
        for ran in self.parts:
            lines += ["", f"## {ran.part.title}", "", *_part_lines(ran)]
        return "\n".join(lines) + "\n"

    def summary(self) -> str:
        """A line for each claim that failed, and how many there are of each kind."""
        lines = [f"FAILED: {_text(one)} {one.why}" for one in self.findings if one.verdict is Verdict.FAILED]
        counted = ", ".join(f"{self.counts[verdict]} {verdict}" for verdict in Verdict)
        return "\n".join([*([self.stand_in] if self.stand_in else []), *lines, counted])

    def _head(self) -> Iterator[str]:
        if self.stand_in:
            yield from (f"**{self.stand_in}**", "")
        yield from _machine_lines(self.machine)
        counted = ", ".join(f"{self.counts[verdict]} {verdict}" for verdict in Verdict)
        yield f"- claims: {counted}"
        yield f"- {self.date}, {self.seconds:.0f} s of at most {self.minutes:g} minutes, seed {self.seed}"

    def _claims(self) -> Iterator[str]:
        yield "| claim | of | verdict | what it rests on |"
        yield "| --- | --- | --- | --- |"
        before = ""
        for one in self.findings:
            claim = one.claim if one.claim != before else ""
            numbers = {} if one.verdict is Verdict.NOT_MEASURED else one.numbers
            rests = "; ".join(filter(None, (one.why, _numbers(numbers))))
            yield f"| {claim} | {one.subject} | {_SIGNS[one.verdict]} | {rests.replace('|', '/')} |"
            before = one.claim


def _text(one: Finding) -> str:
    return f"{one.claim} ({one.subject})" if one.subject else one.claim


def _numbers(numbers: Mapping[str, Number]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in numbers.items() if value is not None)


def _number(value: Number) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _machine_lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Cards, driver and versions, a line each."""
    for number, card in enumerate(data.get("gpus", ())):
        yield (
            f"- GPU {number}: {card['name']}, compute capability {card['compute_capability']}, "
            f"{card['memory_bytes'] / 2**30:.0f} GiB, {card['multiprocessors']} multiprocessors"
        )
    asked = data.get("nvidia_smi", {})
    for card in asked.get("gpus", ()):
        yield (
            f"- GPU {card['index']}: power limit {card['power.limit']}, clocks {card['clocks.sm']} of "
            f"{card['clocks.max.sm']}, memory {card['clocks.max.mem']}, driver {card['driver_version']}"
        )
    if "note" in asked:
        yield f"- {asked['note']}"
    if versions := data.get("versions"):
        yield "- " + ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    if host := data.get("host"):
        yield f"- host: {host['cpus']} CPUs, {host['cpu']}, {host['platform']}"


def _part_lines(ran: Ran) -> Iterator[str]:
    yield f"not measured: {ran.trouble}" if not ran.seconds else f"{ran.seconds:.0f} s{_trouble(ran)}"
    for one in ran.written.tables:
        yield from ("", f"{one.title}:", "", "```", *one.lines, "```")
    if ran.log:
        yield from ("", "The end of what the process printed:", "", "```", *ran.log, "```")


def _trouble(ran: Ran) -> str:
    return f"; {ran.trouble}" if ran.trouble else ""


def _part_json(ran: Ran) -> dict[str, Any]:
    return {
        "name": ran.part.name,
        "title": ran.part.title,
        "seconds": round(ran.seconds, 1),
        "trouble": ran.trouble,
        "tables": [asdict(one) for one in ran.written.tables],
        "data": ran.written.data,
        "log": ran.log,
    }


def as_text(report: Report) -> str:
    """The JSON file."""
    return json.dumps(report.as_json(), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """The same with words for what is no finite number, which JSON cannot hold."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
    return value
