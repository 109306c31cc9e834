"""Wrong calls of `generate`, `evaluate` and for the best checkpoint: one line each, before torch is loaded.

What only a run with checkpoints shows stands in `tests/end_to_end/test_generate.py`, names on the Hub in
`tests/jobs/test_hub_names.py`.
"""

import shlex
from pathlib import Path

from tests.jobs.mistakes import make

FIRST = """\
name: first
model: {family: llama, hidden: 64, layers: 4, heads: 4, sequence: 32}
data: {files: [python-stdlib]}
train: {steps: 20, global_batch: 8, micro_batch: 2}
"""
SAY = "generate runs/old --prompt x"
SCORE = "evaluate runs/old --tasks arc_easy"
MISTAKES = {
    "generate --prompt x": "braid generate needs RUN|DIR: A run, one of its checkpoints, or a folder of",
    "generate runs/old": "braid generate needs --prompt: The beginning of the text",
    "generate runs/absent --prompt x": "there is no run runs/absent; there are runs/old",
    "generate pickles --prompt x": "pickles holds config.json and no safetensors",
    SAY: "there is no checkpoint in runs/old/checkpoints yet",
    "generate runs/old --prompt ''": "--prompt is empty; give some text",
    f"{SAY} --temperature -1": "--temperature -1 must be a number from 0 on",
    f"{SAY} --temperature nan": "--temperature nan must be a number from 0 on",
    f"{SAY} --top-p 0": "--top-p 0 must be above 0 and at most 1",
    f"{SAY} --top-p 0.5 --temperature 0": "--top-p draws tokens, and --temperature 0 takes the likeliest",
    f"{SAY} --max-tokens 0": "Invalid value for '--max-tokens'",
    f"{SAY} --max-token 5": "has no option --max-token; did you mean '--max-tokens'?",
    SCORE.replace(" --tasks arc_easy", ""): "braid evaluate needs --tasks",
    f"{SCORE} --include-path absent": "--include-path absent is no folder",
    f"{SCORE} --output no/scores.json": "--output no/scores.json: the folder no does not exist",
    f"{SCORE} --limit 0": "Invalid value for '--limit'",
    "generate absent --prompt x": "there is no run absent; . holds no runs",
    "generate first.yaml --prompt x": "first.yaml is neither a run nor a checkpoint",
    "evaluate runs/absent --tasks absent": "there is no run runs/absent; there are runs/old",
    "checkpoint export runs/absent out --checkpoint best": "there is no run runs/absent; there are runs/old",
    "train first.yaml --set checkpoint.keep_best=true": "checkpoint.keep_best=true|train.validate_every=0",
    "train first.yaml --set checkpoint.keep_best=2": "checkpoint.keep_best=2: must be true or false",
}
"""Calls, and the texts of what is said of them, between bars."""


def test_one_line_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text(FIRST)
    (tmp_path / "runs" / "old" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "old" / "config.yaml").write_text("name: old")
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "config.json").write_text("{}")
    before = {*tmp_path.rglob("*")}
    made = make([(tmp_path, shlex.split(call)) for call in MISTAKES])
    for (call, says), found in zip(MISTAKES.items(), made, strict=True):
        assert found.code == 2, (call, found)
        assert found.errors.startswith("braid: ")
        assert found.errors.count("\n") == 1, found.errors
        for text in says.split("|"):
            assert text in found.errors, (call, found.errors)
        assert not found.output
        assert not found.loaded, call
        assert not found.started
    assert {*tmp_path.rglob("*")} == before
