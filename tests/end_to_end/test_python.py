"""`braid.train` and `braid.load_run` from scripts, threads and notebooks (Ray: test_python_ray.py)."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import braid
from braid.actors.config import ConfigError
from tests.end_to_end.command import BASE, ROOT, environment, losses_of, write_corpus
from tests.waiting import alive, within

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "python.md"
NOTEBOOK = ROOT / "docs" / "notebooks" / "first.ipynb"


def content(folder: Path, **sections: Any) -> dict[str, Any]:
    """A run of four steps with two ranks, as a mapping."""
    base = {**BASE, "runs": str(folder / "runs"), "parallel": {"tp": 2}, "telemetry": {"page": False}}
    base["data"] = {"files": [str(write_corpus(folder))], "validation_fraction": 0.1}
    base["cluster"] = {**BASE["cluster"], "cpus_per_rank": 0.5}
    return {**base, **{name: {**base.get(name, {}), **keys} for name, keys in sections.items()}}


class Heard:
    """A callback with all methods; ``then`` is called with each one's name and argument."""

    def __init__(self, then: Any = lambda name, argument: None) -> None:
        self.calls: list[str] = []
        self.errors: list[BaseException] = []
        self._then = then

    def _hear(self, name: str, argument: Any) -> None:
        self.calls.append(name)
        self._then(name, argument)

    def on_start(self, event: Any) -> None:
        assert isinstance(event, braid.Started)
        self._hear("start", event)

    def on_step(self, record: Any) -> None:
        assert isinstance(record, braid.StepRecord)
        self._hear(f"step {record.step}", record)

    def on_validation(self, record: Any) -> None:
        assert record.validation_loss > 0
        self._hear("validation", record)

    def on_checkpoint(self, event: Any) -> None:
        assert isinstance(event, braid.CheckpointSaved)
        self._hear(f"checkpoint {event.step}", event)

    def on_failure(self, error: BaseException) -> None:
        self.calls.append("failure")
        self.errors.append(error)

    def on_end(self, report: Any) -> None:
        self._hear("end", report)


def ranks_of(run: Path) -> list[int]:
    return list(json.loads((run / "cluster.json").read_text())["processes"])


def left_of(run: Path) -> list[int]:
    """Ranks that still live after a moment."""
    within(10, lambda: not any(map(alive, ranks_of(run))))
    return [process for process in ranks_of(run) if alive(process)]


Trained = tuple[braid.TrainingResult, Heard, dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run of four steps, two of them validated; what a callback heard, and what it saw in the third."""
    folder = tmp_path_factory.mktemp("trained")
    seen: dict[str, Any] = {}

    def look(name: str, argument: Any) -> None:
        if name == "step 3":
            now = braid.load_run(folder / "runs" / "run")
            seen.update(page=now.page, report=now.report, rows=len(now.steps()), html=now._repr_html_())

    heard, before = Heard(look), signal.getsignal(signal.SIGINT)
    config = content(folder, train={"validate_every": 2}, telemetry={"page": True})
    result = braid.train(config, callbacks=[heard, object.__new__(braid.Callback)])
    assert signal.getsignal(signal.SIGINT) is before
    return result, heard, seen


@pytest.fixture(scope="module")
def run(trained: Trained) -> braid.Run:
    return braid.load_run(trained[0].directory)


def test_each_callback_hears_what_happens_in_order(trained: Trained) -> None:
    result, heard, _ = trained
    steps = ["step 1", "step 2", "validation", "step 3", "step 4", "validation"]
    assert heard.calls == ["start", *steps, "checkpoint 4", "end"]
    assert (result.complete, result.stopped, result.steps) == (True, None, 4)
    report = json.loads((result.directory / "report.json").read_text())
    assert json.loads(json.dumps(result.report)) == report
    assert result.loss == losses_of(result.directory.parents[1], "run")[-1]
    assert result.validation_loss == result.report["validation"]["loss"]
    assert left_of(result.directory) == []


def test_a_callback_stops_the_run_and_the_next_call_goes_on(tmp_path: Path) -> None:
    def stop(name: str, argument: Any) -> None:
        if name == "step 2":
            raise braid.StopTraining("it is enough")

    heard, other = Heard(stop), Heard()
    run = content(tmp_path)
    result = braid.train(run, callbacks=[heard, other])
    assert (result.complete, result.stopped, result.steps) == (False, "it is enough", 2)
    assert heard.calls == other.calls == ["start", "step 1", "step 2", "checkpoint 2", "end"]
    assert left_of(result.directory) == []
    rest = braid.train(run, resume=True, until=3)
    assert (rest.complete, rest.stopped, rest.steps) == (False, "until=3", 3)
    whole = braid.train({**run, "name": "whole"}, resume="if-begun")
    assert losses_of(tmp_path, "run") == losses_of(tmp_path, "whole")[:3], "bit for bit"
    assert whole.complete


@pytest.mark.parametrize("when", ["start", "step 2", "end"])
def test_a_callback_that_raises_ends_the_run_with_its_error(tmp_path: Path, when: str) -> None:
    def fail(name: str, argument: Any) -> None:
        if name == when:
            raise KeyError("a mistake of the caller")

    heard, other = Heard(fail), Heard()
    with pytest.raises(KeyError, match="a mistake of the caller") as caught:
        braid.train(content(tmp_path), callbacks=[heard, other])
    assert caught.value.__notes__ == [f"raised by on_{when.split()[0]} of the callback Heard"]
    assert heard.errors == other.errors == [caught.value]
    assert heard.calls[-2:] == [when, "failure"]
    assert other.calls[-1] == "failure"
    assert when not in other.calls, "the second callback is not called after the first one has raised"
    run = tmp_path / "runs" / "run"
    assert left_of(run) == []
    saved = {"start": 0, "step 2": 2, "end": 4}[when]
    assert len(list((run / "checkpoints").glob("step-*"))) == bool(saved)
    if when == "step 2":
        assert braid.train(content(tmp_path), resume=True).steps == 4


def test_stopped_before_the_first_step(tmp_path: Path) -> None:
    class Never:
        def on_event(self, event: Any) -> None:
            raise braid.StopTraining

    heard = Heard()
    with pytest.raises(braid.StoppedError, match="before its first step; nothing is lost"):
        braid.train(content(tmp_path), callbacks=[Never(), heard])
    assert heard.calls == ["failure"]
    assert not (tmp_path / "runs" / "run").exists()

    class AtOnce:
        def on_start(self, event: Any) -> None:
            raise braid.StopTraining

    result = braid.train(content(tmp_path), callbacks=[AtOnce()])
    assert (result.stopped, result.steps, result.loss) == ("on_start of AtOnce", 0, None)
    assert left_of(result.directory) == []


def test_on_failure_hears_of_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    heard = Heard()
    with pytest.raises(ConfigError) as caught:
        braid.train(content(tmp_path, train={"micro_batch": 3}), callbacks=[heard])
    assert heard.errors == [caught.value]


def test_two_threads_at_once_with_a_sink_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases without a key: nobody can give it one here."""
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    results: list[braid.TrainingResult] = []
    told: list[str] = []

    class Keeps:
        def on_event(self, event: Any) -> None:
            if isinstance(event, braid.Incident) and event.kind == "telemetry":
                told.append(event.text)

    def run(name: str) -> None:
        telemetry = {"wandb": "online"} if name == "other" else {}
        config = {**content(tmp_path, telemetry=telemetry), "name": name}
        results.append(braid.train(config, callbacks=[Keeps()]))

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.complete for result in results] == [True, True]
    assert losses_of(tmp_path, "one") == losses_of(tmp_path, "other")
    (text,) = told
    assert text.startswith("telemetry.wandb gets no more numbers of this run, which goes on: No API key")


# -- frames --------------------------------------------------------------------------------------------------


def test_frames_hold_what_the_files_hold(run: braid.Run) -> None:
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    steps = run.steps()
    assert steps.index.tolist() == [1, 2, 3, 4]
    for name in ("loss", "lr", "seconds", "communication_seconds"):
        assert steps[name].tolist() == [line[name] for line in lines]
    assert steps["exposed_by_axis.tp"].tolist() == [line["exposed_by_axis"]["tp"] for line in lines]
    assert steps["peak_bytes"].tolist() == [max(line["peak_bytes"]) for line in lines]
    assert run.validations().index.tolist() == [2, 4]
    assert run.validations()["validation_loss"].tolist() == [lines[n]["validation_loss"] for n in (1, 3)]
    assert run.incidents()["kind"].tolist() == ["started", "saved", "finished"]
    assert run.failures().empty
    assert run.checkpoints().index.tolist() == [4]
    size = sum(path.stat().st_size for path in Path(run.checkpoints()["path"][4]).glob("*.distcp"))
    assert run.checkpoints()["bytes"][4] >= size > 0
    assert run.report is not None
    assert run.report["complete"]
    assert run.config["parallel"]["tp"] == 2


def test_numbers_of_overlap_are_those_of_the_records(run: braid.Run) -> None:
    """Means over the ranks, which each computed its own."""
    means, steps = run.overlap().groupby("step").mean(), run.steps()
    for name in ("communication", "exposed", "waiting", "bubble", "launch_gap"):
        assert (means[f"{name}_ns"] / 1e9).tolist() == pytest.approx(steps[f"{name}_seconds"].tolist())
    spans = run.spans(3)
    assert set(spans["rank"]) == {0, 1}
    assert spans["start_ns"].min() == 0
    assert (spans["end_ns"] >= spans["start_ns"]).all()
    assert set(spans["stream"]) <= {"compute", "intra", "inter"}
    transfers = spans[(spans["stream"] != "compute") & (spans["kind"] == "operator")]
    assert set(transfers["axis"]) == {"tp"}


def test_the_page_names_every_column(run: braid.Run) -> None:
    named = set(re.findall(r"`([\w.*]+)`", PAGE.read_text(encoding="utf-8")))
    columns = [*run.steps().columns, *run.spans(1).columns]
    known = named | {name.partition(".")[0] for name in named if name.endswith(".*")}
    assert [name for name in columns if name not in known and name.partition(".")[0] not in known] == []


def test_a_run_is_shown_in_a_notebook_also_while_it_is_under_way(run: braid.Run, trained: Trained) -> None:
    shown = run._repr_html_()
    assert "<svg" in shown
    assert "complete" in shown
    assert "<iframe" not in shown
    assert run.timeline(2).startswith("<svg")
    seen = trained[2]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", seen["page"])
    assert (seen["report"], seen["rows"]) == (None, 3)
    assert f'<iframe src="{seen["page"]}"' in seen["html"]
    assert "under way" in seen["html"]
    assert run.page is None
    (run.directory / "page-address").write_text("http://198.51.100.1:80/")
    assert run.page is None


def test_without_pandas_the_rest_of_a_run_can_be_read(
    run: braid.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        ValueError, match=r"need pandas, which is not installed: pip install 'braid\[frames\]'"
    ):
        run.steps()
    assert run.report is not None
    assert "<svg" in run._repr_html_()


def test_wrong_questions_about_a_run(run: braid.Run, tmp_path: Path) -> None:
    for path, says in (
        (tmp_path, "holds no run"),
        (tmp_path / "absent", "is no directory"),
        (3, "path=3 must"),
    ):
        with pytest.raises(ValueError, match=says):
            braid.load_run(path)  # type: ignore[arg-type]
    for step in (0, 5, "2"):
        with pytest.raises(ValueError, match=rf"step={step!r} .* spans are kept of steps 1 to 4"):
            run.spans(step)  # type: ignore[arg-type]


# -- the page and the notebook -------------------------------------------------------------------------------


def examples() -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def run_script(folder: Path, code: str) -> str:
    """Run a script with the examples; return what it prints."""
    (folder / "script.py").write_text(code, encoding="utf-8")
    options: dict[str, Any] = {"env": environment(), "capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    blocks = [block for block in examples() if "ray" not in block]
    assert len(blocks) == len(examples()) - 1 >= 4
    guarded = "".join(
        f"    {line}\n" if line else "\n" for block in blocks[2:] for line in block.splitlines()
    )
    said = run_script(tmp_path, "".join(blocks[:2]) + 'if __name__ == "__main__":\n' + guarded)
    assert str(tmp_path / "runs" / "first") in said


def test_the_notebook_runs_and_holds_no_outputs(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs or cell.execution_count for cell in cells] == [None] * len(cells)
    asyncio.run(_executed(notebook, tmp_path))
    shown = [output for cell in cells for output in cell.outputs]
    assert not [output for output in shown if output.output_type in ("error", "stream") and _noise(output)]
    html = [output.data["text/html"] for output in shown if "text/html" in output.get("data", {})]
    assert any("<svg" in text and "20/20" in text for text in html), (
        "progress: one output, with the loss curve"
    )
    assert any("complete" in text for text in html)
    assert left_of(tmp_path / "runs" / "first-in-a-notebook") == []


async def _executed(notebook: Any, folder: Path, interrupt_after: Path | None = None) -> None:
    """Run a notebook in a kernel; interrupt it as its button does, once a file has two lines."""
    from nbclient import NotebookClient

    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=200, kernel_name="python3", resources=resources)
    running = asyncio.create_task(client.async_execute(env=environment()))
    while interrupt_after is not None and not running.done():
        if interrupt_after.exists() and interrupt_after.read_text().count("\n") >= 2:
            await client.km.interrupt_kernel()
            break
        await asyncio.sleep(0.1)
    await running


def test_the_button_that_interrupts_a_cell_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    v4 = pytest.importorskip("nbformat.v4")
    config = content(tmp_path, train={"steps": 5000})
    code = f"import braid\nresult = braid.train({config!r})\nresult.stopped, result.steps"
    notebook = v4.new_notebook(cells=[v4.new_code_cell(code)])
    run = tmp_path / "runs" / "run"
    asyncio.run(_executed(notebook, tmp_path, interrupt_after=run / "metrics.jsonl"))
    steps = len(losses_of(tmp_path, "run"))
    assert notebook.cells[0].outputs[-1].data["text/plain"] == f"('a signal', {steps})"
    assert braid.load_run(run).checkpoints().index.tolist() == [steps]
    assert left_of(run) == []


def _noise(output: Any) -> bool:
    return output.output_type == "error" or output.name == "stderr"
