"""What a person reads of a run: no line is cut or too wide; how long the rest will take, and what is odd."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from braid.actors.config import Config, parse_config
from braid.actors.controller.records.json_lines import read_lines
from braid.actors.controller.records.reporting import build_report
from braid.actors.controller.records.run_records import Finished, Started, StepDone
from braid.actors.controller.records.step_record import StepRecord
from braid.jobs.commands.demo import PICTURE, STRETCH, Demo
from braid.jobs.data.prepare import Prepared
from braid.jobs.output import duration
from braid.jobs.training.display import Display, prediction_line, report_table, validation_line
from braid.jobs.training.remarks import on_data, on_learning_rate
from tests.actors.test_records import a_record
from tests.end_to_end.command import braid
from tests.jobs.corpora import prepared


def test_validation_is_told_in_both_units() -> None:
    nats, bits = "2.5000 nats per token", "3.000 bits per byte"
    for loss, found, line in ((2.5, 3.0, f"{nats}, {bits}"), (2.5, None, nats), (None, None, "-")):
        assert validation_line({"loss": loss, "bits_per_byte": found}) == line


def record(step: int, **changed: Any) -> StepRecord:
    """A step of as many digits as there are ever."""
    seconds = {"seconds": 12.345, "communication_seconds": 12.345, "wall_seconds": 12.5}
    wide = {"loss": 10.12345, "lr": 1e-3, "tokens": 1_500_000, "peak_bytes": (100 << 30,), **seconds}
    return a_record(step, **{**wide, "grad_norm": 1.0, "exposed_seconds": 0.0, **changed})


def shown(last: int, *events: Any, width: int = 160) -> list[str]:
    """What is said of a run without a terminal; every step is."""
    file = io.StringIO()
    display = Display(Console(file=file, width=width), live=True)
    begun = Started(first_step=1, last_step=last, ranks=1, layout="1 rank", run_directory="runs/first")
    for event in (begun, *events):
        display._last_line = float("-inf")
        display.show(StepDone(record=event, ranks={}) if isinstance(event, StepRecord) else event)
    return file.getvalue().splitlines()


def test_an_event_that_cannot_be_shown_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(Console(file=io.StringIO()), live=False)
    for _ in range(5):
        display.on_event(Finished(complete=True, report={}))
    (told,) = capsys.readouterr().err.splitlines()
    assert "an event cannot be shown (KeyError: 'steps'); training goes on" in told


def steps(last: int, *records: StepRecord) -> list[str]:
    return [line for line in shown(last, *records, width=80) if line.startswith("step")]


def test_a_run_with_a_skipped_step_ends_with_its_report() -> None:
    """Its first loss was no number; what follows is."""
    validation: dict[str, Any] = {"validation_loss": 1.5, "validation_bits_per_byte": 2.0}
    validation["between_seconds"] = {"validation": 0.1}
    records = [a_record(1, loss=math.nan, grad_norm=math.nan), a_record(2), a_record(3, **validation)]
    config: Config = parse_config({"name": "skipped", "train": {"steps": 3}})
    report = build_report(iter(records), config, complete=True)
    said = shown(3, *records, Finished(complete=True, report=report))
    assert any("nan -> 3.0000" in line for line in said)
    assert any("1.5000 nats per token, 2.000 bits per byte" in line for line in said)
    assert said[-1] == "done"


@pytest.mark.parametrize("loss", [None, 10.1234])
def test_step_lines_fit_in_100_columns(loss: float | None) -> None:
    bits = None if loss is None else 14.6051
    (line,) = steps(200_000, record(100_000, validation_loss=loss, validation_bits_per_byte=bits))
    assert len(line) <= 100
    assert line.endswith("ETA 14 d")  # 100,000 steps of 12.5 s
    told = "validation 10.1234 nats per token, 14.605 bits per byte"
    assert (told in line) == (loss is not None)


def test_what_is_left_takes_as_long_as_the_last_steps() -> None:
    lines = steps(40, record(8, wall_seconds=1.0), record(9, wall_seconds=3.0))
    assert lines[0].endswith("ETA 0:00:32")
    assert lines[1].endswith("ETA 0:01:02")  # 31 steps of 2 s
    assert (duration(3725), duration(100 * 3600 - 1)) == ("1:02:05", "99:59:59")


def test_the_live_table_is_whole_in_80_columns() -> None:
    file = io.StringIO()
    display = Display(Console(file=file, width=80, force_terminal=True), live=True)
    display._last_step = 200_000
    with display.running():
        display.show(StepDone(record=record(100_000, validation_bits_per_byte=2.5), ranks={}))
    for name in ("validation", "tokens/s", "step time", "communication", "hidden", "memory"):
        assert name in file.getvalue()
    assert "100000/200000" in file.getvalue()
    assert "…" not in file.getvalue()


def test_a_prediction_that_is_far_off_is_remarked_on() -> None:
    records = [record(step, seconds=seconds) for step, seconds in enumerate((9.0, 0.417, 0.417, 0.5), 1)]
    for predicted, says in ((0.209, "2.0 x off"), (0.4, None)):
        report = build_report(records, parse_config({}), complete=True, predicted_seconds=predicted)
        assert report["prediction"] == {"step_seconds": predicted, "measured_seconds": 0.417}
        line = prediction_line(report["prediction"])
        assert "417 ms measured" in line
        assert ("braid profile --anew" in line) == (says is not None)
        assert says is None or says in line
        assert "prediction" in list(report_table(report).columns[0].cells)
    assert "prediction" not in build_report(records, parse_config({}), complete=True)


# ``braid demo``: two short runs, the same losses, both timelines; and what it says where that is not so.

FOUND = Demo(
    seconds=((0.3, 0.9, 0.36, 0.32), (0.2, 0.6, 0.3, 0.1)),
    hidden=(0.0, 0.82),
    compared=12,
    alike=12,
    validation={"loss": 5.0, "bits_per_byte": 3.0},
    runs=(Path("a"), Path("b")),
)


def test_the_sentence_says_what_was_won() -> None:
    """Pair by pair: other work slows both steps of a pair alike."""
    assert FOUND.sentence == (
        "1.50x faster: 82% of communication hidden (0% without); same losses to the last bit in the 12 steps "
        "that both made"
    )
    assert "a fault: other losses in 1 of the 12 steps" in replace(FOUND, alike=11).sentence
    assert FOUND.typical == (4, 4), "0.36 s and 0.3 s, behind the two steps that are left out"


@pytest.mark.slow
def test_a_small_demo(tmp_path: Path) -> None:
    sizes = ("model.hidden=64", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.sequence=64")
    short = (f"train.steps={STRETCH + 3}", "train.validate_every=0", "telemetry.page=false")
    words = [word for key in (*sizes, *short) for word in ("--set", key)]
    outcome = braid(tmp_path, "demo", *words, timeout=240)
    assert outcome.code == 0, outcome.errors
    assert f"same losses to the last bit in the {STRETCH} steps that both made" in outcome.output
    assert "emulated" in outcome.output
    for name in ("without overlap: ", "with overlap: ", "bits per byte"):
        assert name in outcome.output
    runs = [tmp_path / "runs" / name for name in ("demo", "demo-without-overlap")]
    ends = [[line["time"] for line in read_lines(run / "metrics.jsonl")[:STRETCH]] for run in runs]
    both = [end for pair in zip(*ends, strict=True) for end in pair]
    assert both == sorted(both), "the two runs made their steps by turns"
    assert (runs[0] / PICTURE).read_text().startswith("<svg")


# -- what is told of a run before it begins, though nothing is wrong -----------------------------------------


def configured(folder: Path, **sections: Any) -> Config:
    return parse_config({"name": "run", "runs": str(folder), **sections})


def written(folder: Path, *texts: str, more: bytes = b"", **options: Any) -> Prepared:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "a.jsonl").write_bytes(lines.encode() + more)
    return prepared(folder / "data", folder / "a.jsonl", **options)


def test_what_was_left_out_is_told(tmp_path: Path) -> None:
    texts = ["some text"] * 40 + [" "] * 2 + [""]
    done = written(tmp_path, *texts, more=b'{"text": "\xff"}\n', encoding_errors="skip")
    config = configured(tmp_path, model={"sequence": 1}, train={"validation_samples": 1})
    assert list(on_data(config, done)) == [
        "data.files: 1 document not in UTF-8 left out; convert the files, or keep what can be read with "
        "data.encoding_errors=replace",
        "data.files: 3 documents without any text left out",
    ]


def test_splits_that_are_too_small_are_told(tmp_path: Path) -> None:
    done = written(tmp_path, *(f"{number:09}" for number in range(20)), validation_fraction=0.2)
    held_out = done.index.tokens("validation") // 10
    assert 2 <= held_out <= 8, "documents of ten tokens"
    tokens, model = done.index.tokens("train"), {"sequence": 10}
    train = {"global_batch": 40, "micro_batch": 4, "validation_samples": 30}
    assert list(on_data(configured(tmp_path, model=model, train=train), done)) == [
        f"the training split has {tokens} tokens, {(tokens - 1) // 10} samples of "
        f"model.sequence=10, and every step takes train.global_batch=40, the same text several times; "
        f"add text to data.files",
        f"validation takes all {held_out - 1} samples that are held out, where train.validation_samples=30 "
        f"asks for more; raise data.validation_fraction, or add text to data.files",
    ]
    enough = {"global_batch": 4, "validation_samples": 1}
    assert list(on_data(configured(tmp_path, model=model, train=enough), done)) == []


def test_a_warm_up_that_does_not_end_is_told(tmp_path: Path) -> None:
    for warmup, told in ((100, 0), (101, 1), (500, 1)):
        train = {"steps": 100, "warmup_steps": warmup}
        found = list(on_learning_rate(configured(tmp_path, train=train), resume=False))
        assert len(found) == told
        assert all(f"train.warmup_steps={warmup} is more than train.steps=100" in text for text in found)


def test_a_rate_that_leaps_on_resuming_is_told(tmp_path: Path) -> None:
    """The decay of a run of 100 steps is nearly over in step 90; in one of 300 it has hardly begun."""

    def cosine(step: int, steps: int) -> float:
        """Of step ``step``, from 1, with 10 steps of warm-up, from 1e-3 down to a tenth."""
        return 1e-4 + 9e-4 * (1 + math.cos(math.pi * (step - 1 - 10) / (steps - 10))) / 2

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 90, "lr": cosine(90, 100)}) + "\n")
    same, longer = (configured(tmp_path, train={"steps": steps}) for steps in (100, 300))
    assert list(on_learning_rate(same, resume=True)) == list(on_learning_rate(longer, resume=False)) == []
    (text,) = on_learning_rate(longer, resume=True)
    assert f"from {cosine(90, 100):.3g} in step 90 to {cosine(91, 300):.3g} in the next one" in text
    (tmp_path / "run" / "config.yaml").write_text("train: {steps: 100, schedule: cosine}\n")
    (text,) = on_learning_rate(longer, resume=True)
    assert "(train.steps was 100 and is 300 now)" in text
    assert list(on_learning_rate(same, resume=True)) == []


def test_a_horizon_that_moves_without_a_leap_is_told(tmp_path: Path) -> None:
    """Before the decay begins, a longer run goes on at the same rate."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 50, "lr": 1e-3}) + "\n")
    (tmp_path / "run" / "config.yaml").write_text("train: {steps: 100, schedule: stable_decay}\n")
    train = {"steps": 300, "schedule": "stable_decay", "decay_steps": 50, "min_lr_fraction": 0.0}
    (text,) = on_learning_rate(configured(tmp_path, train=train), resume=True)
    assert text.startswith("train.steps was 100 and is 300 now")
    assert text.endswith("goes on from 0.001 in step 50, and ends with 2e-05 in step 300")
