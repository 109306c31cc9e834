"""Natural mistakes: one line with the remedy and exit code 2, before Ray, torch or a rank are started."""

import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.jobs.mistakes import Made, make

ROOT = Path(__file__).resolve().parents[2]

FIRST = """\
name: first
model: {family: llama, hidden: 128, layers: 4, heads: 4, sequence: 128}
data: {files: [corpus.txt]}
train: {steps: 20, global_batch: 8, micro_batch: 4, lr: 1.0e-3}
"""


@dataclass(frozen=True)
class Mistake:
    """A call, and what is said of it."""

    call: str
    says: tuple[str, ...]


def mistake(call: str, *says: str) -> Mistake:
    return Mistake(call, says)


MISTAKES = [
    mistake("trian first.yaml", "'braid trian'; did you mean 'train'?"),
    mistake("train", "braid train needs CONFIG"),
    mistake("train first.yaml --overwite", "no option --overwite; did you mean '--overwrite'?"),
    mistake("train first.yml", "first.yml does not exist", "did you mean first.yaml?"),
    mistake("train broken.yaml", "broken.yaml is not valid YAML", "line 1"),
    mistake("train first.yaml --set train.learning_rate=1e-3", "did you mean 'train.lr'?"),
    mistake("train first.yaml --set batch_size=8", "did you mean 'train.global_batch'?"),
    mistake("train first.yaml --set trian.lr=1", "did you mean 'train'?"),
    mistake("train first.yaml --set train.lr", "key=value"),
    mistake("train first.yaml --set train.lr=true", "train.lr=true: must be a number > 0"),
    mistake("train first.yaml --set train.steps=1.5", "train.steps=1.5: must be a whole number"),
    mistake("train first.yaml --set train.betas=[1.5,0.95]", "train.betas[0]=1.5", "at least 0, < 1"),
    mistake("train first.yaml --set train.dtype=fp16", "train.dtype='fp16'", "did you mean 'bf16'?"),
    mistake("train first.yaml --set overlap.schedule=fsdp", "here that is parallel.zero=3"),
    mistake("train first.yaml --set overlap.schedule=dhelx", "did you mean 'dhelix'?"),
    mistake("train first.yaml --set 1=2", "unknown key '1'; known here: name, runs"),
    mistake("train preset.yaml", "model.preset 'llama3-8b' is no preset; did you mean 'llama-3.1-8b'?"),
    mistake("train first.yaml --set parallel.tp=3", "model.heads=4", "parallel.tp to one of 1, 2, 4"),
    mistake("train first.yaml --set parallel.pp=9", "model.layers=4", "parallel.pp=9"),
    mistake("train first.yaml --set parallel.dp=3", "train.global_batch=8", "parallel.dp=3", "use 12"),
    mistake("train first.yaml --set parallel.dp=512 --set train.global_batch=2048", "512 ranks", "lower"),
    mistake("train first.yaml --set data.files=[absent.txt]", "data.files", "absent.txt", "correct the path"),
    mistake("train first.yaml --set data.tokenizer=absent.json", "data.tokenizer", "absent.json", "bytes"),
    mistake("train first.yaml --set overlap.profile=absent.json", "absent.json", "braid profile"),
    mistake("train first.yaml --set overlap.schedule_file=absent.txt", "overlap.schedule_file", "absent.txt"),
    mistake("train first.yaml --set model.initial=absent", "absent", "config.json"),
    mistake("train first.yaml --plan absent.yaml", "plan absent.yaml", "braid plan --output"),
    mistake("train old.yaml", "runs/old already holds a run", "--resume", "--overwrite"),
    mistake("train old.yaml --resume", "there is no checkpoint in", "start without --resume"),
    mistake("train first.yaml --resume", "there is no run in", "start it without --resume"),
    mistake("train huge.yaml", "weights, gradients and optimizer of 405.85 B parameters", "braid plan"),
    mistake(
        "train first.yaml --report no/where.json", "--report no/where.json: the folder no does not exist"
    ),
    mistake(
        "prepare first.yaml --set data.files=[absent.txt]", "data.files", "absent.txt", "correct the path"
    ),
    mistake("plan llama3-8b", "llama3-8b is neither", "did you mean 'llama-3.1-8b'?"),
    mistake("plan llama-3.1-8b --cluster h100x8", "--cluster 'h100x8' is no preset; did you mean 'h100'?"),
    mistake("plan llama-3.1-8b --output no/plan.yaml", "--output no/plan.yaml: the folder no does not exist"),
    mistake("simulate first.yaml --schedule fsdp", "--schedule 'fsdp'", "here that is parallel.zero=3"),
    mistake("explain absent.yaml", "absent.yaml", "braid plan --output"),
    mistake("profile first.yaml --output no/p.json", "--output no/p.json: the folder no does not exist"),
    mistake("report runs/absent", "runs/absent", "give a run's"),
    mistake("drill first.yaml --faults kil-save", "did you mean 'kill-save'?"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """What became of every mistake, by its call."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "first.yaml").write_text(FIRST, encoding="utf-8")
    (folder / "old.yaml").write_text(FIRST.replace("first", "old"), encoding="utf-8")
    (folder / "broken.yaml").write_text("train: [unclosed\n", encoding="utf-8")
    (folder / "preset.yaml").write_text("model: {preset: llama3-8b}\n", encoding="utf-8")
    (folder / "huge.yaml").write_text(
        "model: {preset: llama-3.1-405b}\ndata: {files: [corpus.txt]}\ncluster: {device: cpu}\n",
        encoding="utf-8",
    )
    shutil.copy(ROOT / "LICENSE", folder / "corpus.txt")
    (folder / "runs" / "old").mkdir(parents=True)
    (folder / "runs" / "old" / "config.yaml").write_text("name: old\n", encoding="utf-8")
    calls = [one.call for one in MISTAKES]
    found = dict(zip(calls, make([(folder, shlex.split(call)) for call in calls]), strict=True))
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["old"]  # nothing is left behind
    return found


@pytest.mark.parametrize("one", MISTAKES, ids=lambda one: one.call)
def test_one_line_with_the_remedy(made: dict[str, Made], one: Mistake) -> None:
    what = made[one.call]
    assert what.code == 2, what
    assert what.errors.startswith("braid: "), what
    assert what.errors.count("\n") == 1
    for text in one.says:
        assert text in what.errors
    assert what.output == ""
    assert what.loaded == ()
    assert what.started == ()


SCRIPT = """\
import braid

config = braid.load_config("first.yaml", ["cluster.launcher=processes", "train.steps=1"])
{start}
"""


def _script(folder: Path, start: str) -> "subprocess.CompletedProcess[str]":
    (folder / "first.yaml").write_text(FIRST, encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", folder / "corpus.txt")
    (folder / "script.py").write_text(SCRIPT.format(start=start), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False
    )


def test_a_script_that_its_ranks_would_run_again(tmp_path: Path) -> None:
    ended = _script(tmp_path, "braid.train(config)")
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "script.py, line 4: with cluster.launcher=processes every rank imports this script" in last
    assert 'below `if __name__ == "__main__":`' in last
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "start",
    [
        'if __name__ == "__main__":\n    check()',
        "def start():\n    check()\n\n\nif __name__ == '__main__':\n    start()",
    ],
)
def test_a_script_whose_ranks_do_not(tmp_path: Path, start: str) -> None:
    ended = _script(
        tmp_path, f"from braid.jobs.refusals import check_script as check\n{start}\nprint('fine')"
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "fine\n"
