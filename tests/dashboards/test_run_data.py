"""What is read of a run: steps, ranks, traces; while files grow, begin anew, are damaged or are missing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from braid.dashboards.plan_view import schedule_view
from braid.dashboards.run_data import RunData, compact_json
from braid.scheduling.schedule.operations import Barrier, PassKind
from braid.scheduling.schedule.text import parse
from tests.dashboards.lines import lines_of
from tests.dashboards.made_up_runs import MadeUpRun, made_up
from tests.spans import communication_of, read_folder, spans_of


def told(data: RunData, step: int) -> dict[str, Any]:
    """The timeline of a step's first ranks, as a page gets it."""
    content = data.timeline(step, 0)
    assert content is not None
    return dict(json.loads(compact_json(content)))


def column(data: RunData, name: str, after: int = 0, epoch: int = 0) -> list[Any]:
    """A number of all steps after one; of all steps if the file began anew since the epoch."""
    return [row.get(name) for row in data.metrics(after, epoch)["rows"]]


def read(directory: Path) -> RunData:
    data = RunData(directory)
    data.check()
    data.refresh()
    return data


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 8 ranks and 4 steps."""
    path = tmp_path_factory.mktemp("runs") / "finished"
    made_up(path, 8, 4)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    made_up(path, 2, 2)
    return path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A finished run of 2 ranks and 2 steps, which a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_timeline_numbers_are_those_of_the_trace(finished: Path) -> None:
    data = read(finished)
    lines = lines_of(finished / "ranks.jsonl")
    folder = read_folder(finished)
    for step in (1, 4):
        content = told(data, step)
        spans = spans_of(folder.step(step - 1))
        for row in content["ranks"]:
            own = [span for span in spans if span.rank == row["rank"]]
            moving_ns, exposed_ns = communication_of(own)
            waits = sum(row["exposed"]["end"]) - sum(row["exposed"]["start"])
            assert waits == exposed_ns == row["numbers"]["exposed_ns"]
            assert row["numbers"]["communication_ns"] == moving_ns
            line = lines[step - 1]
            assert row["numbers"]["hidden_ns"] == round(line["hidden_seconds"][row["rank"]] * 1e9)
            names = [content["labels"][label]["operator"] for label in row["spans"]["label"]]
            shown = zip(names, row["spans"]["start"], row["spans"]["end"], strict=True)
            assert sorted(shown) == sorted((s.operator, s.start_ns, s.end_ns) for s in own)


def test_ends_are_marked_in_the_pairing(finished: Path) -> None:
    schedule = parse((finished / "schedule.txt").read_text())
    ((sides, program),) = ((s, p) for s, p in schedule.programs.items() if len(s) > 1)
    assert [side.kind for side in sides] == [PassKind.FORWARD, PassKind.BACKWARD, PassKind.END]
    wanted = [None if isinstance(action, Barrier) else sides[action.turn].kind for action in program]
    assert PassKind.END in wanted
    (pair,) = read(finished).state()["schedule"]["pairs"]
    assert pair["sides"] == ["F:layer", "B:layer", "L:layer"]
    assert [action.get("side") for action in pair["actions"]] == wanted


def test_growth(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "run", 2)
    data = read(run.path)
    assert column(data, "step") == []
    assert data.timeline(1, 0) is None
    versions = data.refresh()
    assert data.refresh() == versions, "nothing new, nothing to tell"
    for step in (1, 2):
        run.step()
        after = data.refresh()
        assert after["metrics"][1] == step
        assert after["trace"][1:] == [1, step]
        assert after["state"] == versions["state"]
    epoch = after["metrics"][0]
    assert column(data, "step", 1, epoch) == [2]
    assert column(data, "step", 2, epoch) == []
    assert column(data, "step", 2, epoch - 1) == [1, 2], "of another epoch: everything"


def test_files_of_old_names_are_read_anew_and_lines_when_they_are_whole(tmp_path: Path) -> None:
    """As of a run that is resumed from an earlier step, and of one that replaces another."""
    run = made_up(tmp_path / "run", 2, 3, seed=1)
    data, metrics = read(run.path), run.path / "metrics.jsonl"
    epoch, before = data.metrics(0, 0)["epoch"], told(data, 1)["ranks"]
    first = metrics.read_bytes().splitlines(keepends=True)[0]
    (run.path / "other").write_bytes(first[:40])
    (run.path / "other").rename(metrics)
    data.refresh()
    answer = data.metrics(3, epoch)
    assert (answer["anew"], answer["rows"]) == (True, [])
    with metrics.open("ab") as file:
        file.write(first[40:])
    data.refresh()
    assert column(data, "step") == [1]
    shutil.rmtree(run.path)
    made_up(run.path, 2, 1, seed=2)
    data.refresh()
    assert data.state()["traced"] == [1]
    assert told(data, 1)["ranks"] != before


def test_damage_is_told_beside_what_is_there(run: Path) -> None:
    path = run / "trace" / "rank-00001.0000.arrows"
    path.write_bytes(path.read_bytes() + bytes(100))
    ranks = told(read(run), 2)["ranks"]
    assert ["is not the begin of a batch" in row["damage"] for row in ranks] == [False, True]


def test_variables_are_shown_by_name(run: Path) -> None:
    config = "name: x\ncluster: {env: {TWO: canary, ONE: canary}, spread: true}\n"
    (run / "config.yaml").write_text(config)
    state = read(run).state()
    assert state["config"]["cluster"] == {"env": ["ONE", "TWO"], "spread": True}
    assert "canary" not in json.dumps(state)


def test_damaged_descriptions_are_named(run: Path) -> None:
    damage = {
        "schedule.txt": "braid schedule 6\nnonsense",
        "profile.json": "{",
        "predicted.json": "[1",
        "config.yaml": "a: [b",
        "cluster.json": "\xff{",
        "trace/predicted.arrows": "[]" * 9,
    }
    for name, content in damage.items():
        (run / name).write_text(content, encoding="latin-1")
    trouble = "\n".join(read(run).state()["trouble"])
    assert trouble.count("\n") >= len(damage) - 1
    assert all(Path(name).name in trouble for name in damage)


def test_odd_lines_do_no_harm(made: Path, run: Path) -> None:
    odd = ["[]", "{}", "7", '{"step": "1"}', '{"step": 1, "peak_bytes": 3}', '{"step": 1, "seconds": "x"}']
    odd.append('{"step": 1, "loss": NaN}')
    for name in ("metrics.jsonl", "ranks.jsonl", "events.jsonl"):
        (run / name).write_text("\n".join([*odd, (run / name).read_text()]))
    data, clean = read(run), read(made)
    assert column(data, "loss") == [None, None, None, *column(clean, "loss")]
    assert data.ranks()["line"] == clean.ranks()["line"]
    json.dumps([data.metrics(0, 0), data.ranks(), data.state()], allow_nan=False)


def linked(path: Path, away: Path) -> None:
    path.rename(away)
    path.symlink_to(away)


def test_links_are_not_followed(run: Path, tmp_path: Path) -> None:
    linked(run / "trace" / "predicted.arrows", tmp_path / "predicted")
    assert read(run).state()["predicted"]["compute_seconds"] is None
    assert read(run).state()["traced"] == [1, 2]
    linked(run / "trace", tmp_path / "elsewhere")
    assert read(run).state()["traced"] == []
    (tmp_path / "link").symlink_to(run)
    assert column(read(tmp_path / "link"), "step") == [1, 2], "a run may be named by a link"
    linked(run / "predicted.json", tmp_path / "predicted.json")
    linked(run / "metrics.jsonl", tmp_path / "metrics.jsonl")
    data = read(run)
    assert data.state()["predicted"] is None
    assert column(data, "step") == []


def test_the_layout_is_told_axis_by_axis_and_the_cluster_rank_by_rank(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\nparallel: {pp: 2, dp: 4, tp: 3, ep: 4}\n")
    (tmp_path / "cluster.json").write_text(json.dumps({"ranks": [{}] * 24}))
    state = read(tmp_path).state()
    assert state["layout"] == {"pp": 2, "dp": 4, "cp": 1, "tp": 3, "ep": 4}
    assert state["cluster"]["ranks"][17]["place"] == {"pp": 1, "dp": 1, "cp": 0, "tp": 2}
    (tmp_path / "config.yaml").write_text("name: x\nparallel: {pp: 2}\n")
    (tmp_path / "cluster.json").write_text('{"addresses": ["a", "b"], "processes": [5, 6]}')
    ranks = read(tmp_path).state()["cluster"]["ranks"]
    assert [(one["node"], one["process"], one["place"]["pp"]) for one in ranks] == [("a", 5, 0), ("b", 6, 1)]


def test_the_same_pass_of_two_micro_batches_is_told_apart() -> None:
    starts = [f"compute {turn}:norm\n  start {turn}:gather on intra" for turn in (0, 1)]
    twice = "\n  ".join(["program F:layer|F:layer", *starts, "wait 0:gather", "wait 1:gather"])
    both = "program F:layer|B:layer\n  compute 0:norm"
    head = "braid schedule 6\nname x\nstages 1\nchunks 1\nmicro_batches 2\nunit 0\nstage 0"
    first, pair = schedule_view(parse(f"{head}\n{twice}\n{both}\n"), None)["pairs"]
    assert (first["sides"], pair["sides"]) == (["F:layer", "B:layer"], ["F:layer", "F:layer"])
    gathers = [(one["verb"], one["turn"]) for one in pair["actions"] if one["operator"] == "gather"]
    assert gathers == [("start", 0), ("start", 1), ("wait", 0), ("wait", 1)]
