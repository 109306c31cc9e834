"""What simulated steps come to: presets of clusters and models under every schedule.

Record a commit in its own checkout, then compare (``--only`` takes cases whose names hold a pattern)::

    PYTHONPATH=$PWD python -m tests.recorded.simulated --out new.json
    PYTHONPATH=$PWD python -m tests.recorded.simulated --compare tests/golden/simulated.json new.json

``tests/golden/simulated.json`` is the record of the commit that wrote it. Numbers are exact, so that another
record of the same commit equals it; ``--compare`` lists by schedule what differs by more than 1e-9 of itself.
All cases take about three minutes. A `ValueError` counts as refused, with its message as it is. The cases of
`cli_cases` go through ``braid simulate --json``; those of `tests.recorded.units` cannot.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from typer.testing import CliRunner

from braid.jobs.cli import app
from braid.scheduling.lowering.named import ScheduleName
from tests.recorded.files import REFUSED, SCHEDULES, Case, chosen, read_cases, write_cases
from tests.recorded.units import unit_cases

NUMBERS: Final = (
    "step_seconds",
    "hidden_fraction",
    "communication_seconds",
    "exposed_seconds",
    "bubble_fraction",
    "bubble_seconds",
    "slowdown_seconds",
    "launch_gap_seconds",
    "peak_bytes",
)
"""What is recorded of the object that ``--json`` prints, beside bytes per GPU and level of links."""
TOLERANCE: Final = 1e-9
"""Relative differences up to this are taken for rounding in another order."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A model on a cluster in a layout; ``micro_batches`` of a replica in a step."""

    cluster: str
    nodes: int
    model: str
    parallel: Mapping[str, int | str]
    micro_batches: int
    micro_batch: int = 1
    variants: Sequence[tuple[str, int]] = (("none", 0),)
    """Recomputation and ZeRO."""
    schedules: Sequence[str] = SCHEDULES
    model_keys: Mapping[str, int] = field(default_factory=dict)
    """Sizes instead of the preset's."""

    @property
    def title(self) -> str:
        """Model, cluster and layout in a few words."""
        keys = "".join(f" {key} {value}" for key, value in self.model_keys.items())
        degrees = " ".join(f"{key} {value}" for key, value in self.parallel.items())
        return f"{self.model}{keys} on {self.nodes} {self.cluster}, {degrees}, {self.micro_batches} mb"

    def arguments(self, schedule: str, recompute: str, zero: int) -> list[str]:
        """Of ``braid``."""
        named = ScheduleName.parse(schedule)
        samples = self.micro_batches * self.micro_batch * int(self.parallel.get("dp", 1))
        replicas = int(self.parallel.get("dp", 1)) * int(self.parallel.get("cp", 1))  # one has no shares
        keys = {
            "parallel": json.dumps({**self.parallel, "zero": zero if replicas > 1 else 0}),
            "train.global_batch": samples,
            "train.micro_batch": self.micro_batch,
            "train.recompute": recompute,
            "overlap.schedule": named.schedule,
            "overlap.pipeline": named.pipeline or "null",
            **{f"model.{key}": value for key, value in self.model_keys.items()},
        }
        sets = [text for key, value in keys.items() for text in ("--set", f"{key}={value}")]
        place = ["--cluster", self.cluster, "--nodes", str(self.nodes)]
        return ["simulate", self.model, *place, *sets, "--json"]


ALL: Final = (("none", 0), ("full", 0), ("none", 1))
FOLDED: Final = (
    "megatron:folded",
    "wavelet",
    "dhelix",
    "braid",
    "braid:eager_w",
    "braid:twins",
    "braid:v",
    "dualpipev",
    "zbv",
)

SITUATIONS: Final = (
    # dense models, tensor parallelism over a node, pipelines over nodes
    Situation(
        cluster="a40",
        nodes=8,
        model="llama-25b",
        parallel={"tp": 8, "pp": 8},
        micro_batches=16,
        variants=ALL,
    ),
    Situation(
        cluster="h100",
        nodes=4,
        model="gpt-18b",
        parallel={"tp": 4, "pp": 4, "dp": 2},
        micro_batches=12,
        variants=ALL,
    ),
    Situation(
        cluster="h200",
        nodes=4,
        model="llama-3.1-70b",
        parallel={"tp": 8, "pp": 4},
        micro_batches=8,
        micro_batch=2,
        variants=(("selective", 0), ("fine", 1)),
    ),
    Situation(
        cluster="b200", nodes=2, model="qwen3-32b", parallel={"tp": 2, "pp": 4, "dp": 2}, micro_batches=16
    ),
    Situation(
        cluster="rtx3090", nodes=2, model="oases-llama-7b", parallel={"tp": 4, "pp": 2}, micro_batches=8
    ),
    Situation(cluster="v100x8", nodes=1, model="bert-1.3b", parallel={"pp": 4, "dp": 2}, micro_batches=8),
    # one table for both ends; chunks of unequal numbers of layers
    Situation(cluster="a100x8", nodes=1, model="qwen3-1.7b", parallel={"tp": 2, "pp": 4}, micro_batches=8),
    # one stage
    Situation(
        cluster="h100",
        nodes=2,
        model="llama-3.1-8b",
        parallel={"tp": 8, "dp": 2},
        micro_batches=6,
        variants=(("none", 0), ("full", 1)),
    ),
    Situation(
        cluster="centauri_a", nodes=4, model="centauri-medium", parallel={"tp": 4, "dp": 8}, micro_batches=2
    ),
    # mixtures of experts
    Situation(
        cluster="h100",
        nodes=4,
        model="mixtral-8x7b",
        parallel={"dp": 8, "ep": 8, "pp": 4},
        micro_batches=8,
        variants=ALL,
    ),
    Situation(
        cluster="a800",
        nodes=2,
        model="phi-31b",
        parallel={"tp": 2, "dp": 4, "ep": 4, "pp": 2},
        micro_batches=8,
    ),
    # context parallelism, both exchanges
    Situation(
        cluster="a800",
        nodes=8,
        model="llama-66b",
        parallel={"tp": 8, "cp": 2, "pp": 4},
        micro_batches=8,
        variants=(("none", 0), ("fine", 0)),
    ),
    Situation(
        cluster="a40",
        nodes=4,
        model="gpt-6.7b",
        parallel={"tp": 4, "cp": 2, "pp": 2, "dp": 2, "context": "ring"},
        micro_batches=4,
    ),
    # micro-batches that some pipelines refuse
    Situation(cluster="h100", nodes=1, model="llama-8b", parallel={"tp": 2, "pp": 4}, micro_batches=5),
)


def cli_cases() -> dict[str, Callable[[], Case]]:
    """Names of the cases that ``braid simulate`` can do, and how to record them."""
    runner = CliRunner()

    def recorded(arguments: Sequence[str]) -> Callable[[], Case]:
        return lambda: _simulated(runner, arguments)

    return {
        f"{situation.title}, recompute {recompute}, zero {zero}: {schedule}": recorded(
            situation.arguments(schedule, recompute, zero)
        )
        for situation in SITUATIONS
        for recompute, zero in situation.variants
        for schedule in situation.schedules
    }


def _simulated(runner: CliRunner, arguments: Sequence[str]) -> Case:
    """The numbers of one step; `RuntimeError` where the command fails but does not refuse."""
    result = runner.invoke(app, list(arguments))
    if isinstance(result.exception, ValueError):
        return {REFUSED: str(result.exception)}
    if result.exit_code:
        raise RuntimeError(f"braid {' '.join(arguments)}: {result.output}") from result.exception
    return numbers_of(json.loads(result.stdout))


def numbers_of(printed: Mapping[str, Any]) -> Case:
    """What is recorded of the object that ``braid simulate --json`` prints."""
    links = printed["communication"]
    found = {name: printed[name] for name in NUMBERS}
    return {**found, **{f"{level}_bytes": links[level]["bytes_per_gpu"] for level in ("intra", "inter")}}


def record(pattern: str | None, tell: Callable[[str], None]) -> dict[str, Case]:
    """All cases whose names hold the pattern."""
    cases = {**cli_cases(), **unit_cases(numbers_of)}
    names = chosen(cases, pattern)
    found: dict[str, Case] = {}
    for number, name in enumerate(names, start=1):
        begin = time.perf_counter()
        found[name] = cases[name]()
        shown = found[name].get(REFUSED) or f"{found[name]['step_seconds']:.6f} s"
        tell(f"{number}/{len(names)} {name}: {shown} ({time.perf_counter() - begin:.2f} s)")
    return found


# -- comparison ----------------------------------------------------------------------------------------------


def relative(old: float, new: float) -> float:
    """Difference of two numbers as a share of the larger one, with the sign of the change."""
    return 0.0 if old == new else (new - old) / max(abs(old), abs(new))


def differences(old: Case, new: Case) -> dict[str, float]:
    """Relative differences beyond the tolerance, by number; 1 for a number that is in one of them alone."""
    shares = {
        name: relative(old[name], new[name]) if name in old and name in new else 1.0
        for name in sorted({*old, *new})
    }
    return {name: share for name, share in shares.items() if abs(share) > TOLERANCE}


def compare(old: Mapping[str, Case], new: Mapping[str, Case]) -> Iterator[str]:
    """Lines about every difference, by schedule; none if there is none."""
    for title, ours, theirs in (("the old", old, new), ("the new", new, old)):
        if alone := sorted(ours.keys() - theirs.keys()):
            yield f"only in {title} record ({len(alone)}):"
            yield from (f"  {name}" for name in alone)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(old.keys() & new.keys()):
        before, after = old[name], new[name]
        schedule = name.rpartition(": ")[2]
        if (REFUSED in before) != (REFUSED in after):
            which, case = ("old", before) if REFUSED in before else ("new", after)
            groups[schedule].append(f"  {name}: refused in the {which} record: {case[REFUSED]}")
        elif REFUSED not in before and (found := differences(before, after)):
            shares = ", ".join(f"{number} {share:+.2e}" for number, share in found.items())
            groups[schedule].append(f"  {name}: {shares}")
    for schedule, lines in groups.items():
        yield f"{schedule} ({len(lines)}):"
        yield from lines


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 where records differ."""
    parser = argparse.ArgumentParser(description="Record simulated steps, or compare two records.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="record to this file")
    action.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="compare two records")
    parser.add_argument("--only", help="only cases whose names hold this pattern")
    given = parser.parse_args(arguments)
    if given.out is not None:
        found = record(given.only, lambda line: print(line, file=sys.stderr, flush=True))
        write_cases(given.out, found)
        return 0
    old, new = (
        {name: cases[name] for name in chosen(cases, given.only)} for cases in map(read_cases, given.compare)
    )
    lines = list(compare(old, new))
    print("\n".join(lines) if lines else f"equal: {len(old)} cases, within {TOLERANCE:g}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
