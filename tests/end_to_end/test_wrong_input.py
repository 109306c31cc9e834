"""Wrong input gets one clear message, exit code 2, no trace, and leaves nothing behind (a table)."""

import fcntl
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.actors.config import ConfigError, parse_config
from braid.actors.controller.records import RunDirectory
from braid.jobs.cli import main
from tests.end_to_end.command import ROOT, braid, left_running, start, write_config, write_corpus

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """What is wrong, and what the message must say."""

    name: str
    says: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = lambda folder: None


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None  # type: ignore[func-returns-value]


def _other_run(folder: Path) -> None:
    run = folder / "runs" / "run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("name: run\n")
    (run / ".lock").touch()


CASES = [
    Case("misspelt key", ("train.lrr", "train.lr"), {"train": {"lrr": 1.0}}),
    Case("misspelt section", ("trian", "train"), {"trian": {"lr": 1.0}}),
    Case("key in no section", ("'lr'", "train.lr"), {"lr": 1.0}),
    Case("wrong type", ("train.steps", "'many'"), {"train": {"steps": "many"}}),
    Case("not finite", ("train.lr", "nan"), {"train": {"lr": float("nan")}}),
    Case("bad name", ("name", "../elsewhere"), {"name": "../elsewhere"}),
    Case("unknown schedule", ("overlap.schedule", "zigzag", "megatron"), {"overlap": {"schedule": "zigzag"}}),
    Case("unknown policy", ("train.recompute", "some", "selective"), {"train": {"recompute": "some"}}),
    Case(
        "policies of too few layers",
        ("train.recompute='2*full none' has 3 policies", "model.layers=4"),
        {"train": {"recompute": "2*full none"}},
    ),
    Case(
        "degrees that are given and policies that are not",
        ("parallel.tensor_degrees=(2, 1, 1, 2)", "train.recompute=auto", "both to auto"),
        {"parallel": {"tp": 2, "tensor_degrees": "2 2*1 2"}, "train": {"recompute": "auto"}},
    ),
    Case(
        "policies that are given and degrees that are not",
        ("train.recompute='2*full 2*none'", "parallel.tensor_degrees=auto", "both to auto"),
        {"parallel": {"tp": 2, "tensor_degrees": "auto"}, "train": {"recompute": "2*full 2*none"}},
    ),
    Case(
        "rounded in an unknown way",
        ("train.reduce_dtype='fp16'", "must be bf16, or null"),
        {"train": {"reduce_dtype": "fp16"}},
    ),
    Case(
        "rounded sums of double precision",
        ("train.reduce_dtype=bf16", "train.dtype=fp64", "train.reduce_dtype to null"),
        {"train": {"reduce_dtype": "bf16", "dtype": "fp64"}},
    ),
    Case(
        "rounded sums that change no bit",
        ("train.reduce_dtype=bf16", "train.deterministic_reduction=true", "train.reduce_dtype to null"),
        {"train": {"reduce_dtype": "bf16", "deterministic_reduction": True}},
    ),
    Case(
        "unknown mirror",
        ("checkpoint.mirror", "sftpp://host", "'sftpp'", "did you mean 'sftp'?"),
        {"checkpoint": {"mirror": "sftpp://host/run"}},
    ),
    Case(
        "override below a value",
        ("parallel is 'auto'", "--set 'parallel={tp: 2}'"),
        {"parallel": "auto"},
        options=("--set", "parallel.tp=2"),
    ),
    Case("override without value", ("--set", "train.lr", "key=value"), options=("--set", "train.lr")),
    Case("missing data file", ("data.files", "missing.txt"), {"data": {"files": ["missing.txt"]}}),
    Case(
        "empty corpus",
        ("data.files", "no text"),
        {"data": {"files": ["empty.txt"]}},
        prepare=_write("empty.txt", b""),
    ),
    Case(
        "not UTF-8",
        ("latin.txt", "UTF-8", "byte 3", "data.encoding_errors"),
        {"data": {"files": ["latin.txt"]}},
        prepare=_write("latin.txt", b"caf\xe9 au lait"),
    ),
    Case(
        "corpus too short",
        ("tokens", "33"),
        {"data": {"files": ["short.txt"]}},
        prepare=_write("short.txt", b"too short for one sample"),
    ),
    Case("missing tokenizer", ("data.tokenizer", "none.json"), {"data": {"tokenizer": "none.json"}}),
    Case("heads and tp", ("model.heads=4", "parallel.tp=3", "1, 2, 4"), {"parallel": {"tp": 3}}),
    Case(
        "kv heads and tp",
        ("model.kv_heads=1", "parallel.tp=2"),
        {"model": {"kv_heads": 1}, "parallel": {"tp": 2}},
    ),
    Case(
        "width of experts and tp",
        ("model.expert_ffn=45", "parallel.tp=2"),
        {
            "model": {"family": "moe", "experts": 4, "top_k": 2, "expert_ffn": 45},
            "parallel": {"tp": 2},
        },
    ),
    Case("hidden and heads", ("model.hidden=32", "model.heads=5"), {"model": {"heads": 5}}),
    Case(
        "layers and folded pp",
        ("model.layers=3", "4 chunks of parallel.pp=2", "at least 4 layers"),
        {
            "model": {"layers": 3},
            "parallel": {"pp": 2},
            "overlap": {"schedule": "megatron", "pipeline": "folded"},
        },
    ),
    Case(
        "ranks in a mesh that they do not make",
        ("overlap.schedule_file", "partition tp/all_gather", "mesh=2x4 has 8 ranks", "tp has 2"),
        {"parallel": {"tp": 2}, "overlap": {"schedule_file": "mesh.txt"}},
        prepare=_write(
            "mesh.txt",
            b"braid schedule 6\nname f\nstages 1\nchunks 1\nmicro_batches 4\nunit 0\n"
            b"partition tp/all_gather mesh 2x4 order 0,1\n"
            b"stage 0\n F0.0\nprogram F:layer\nprogram B:layer\n",
        ),
    ),
    Case(
        "degrees and tp",
        ("parallel.tensor_degrees", "3 does not divide 4", "parallel.tp=4"),
        {"parallel": {"tp": 4, "tensor_degrees": "2*4 2*3"}},
    ),
    Case(
        "degrees and a search",
        ("tensor_degrees=[1, 2]", "auto searches layouts", "parallel.auto to false"),
        {"parallel": {"auto": True, "tensor_degrees": [1, 2]}},
    ),
    Case(
        "a key that is gone",
        ("parallel.late_layers=1: this key is gone", "raise parallel.zero"),
        {"parallel": {"pp": 2, "late_layers": 1}},
    ),
    Case(
        "degrees of layers and a search",
        ("tensor_degrees=[2, 1, 1, 2]", "auto searches layouts", "parallel.auto to false"),
        {"parallel": {"auto": True, "tp": 2, "tensor_degrees": "2 2*1 2"}},
    ),
    Case(
        "degrees that are no degrees",
        ("parallel.tensor_degrees", "'two' must be a degree", "12*4 12*2"),
        {"parallel": {"tp": 2, "tensor_degrees": "two 3*1"}},
    ),
    Case(
        "degrees and layers",
        ("parallel.tensor_degrees has 3 degrees", "model.layers=4"),
        {"parallel": {"tp": 2, "tensor_degrees": [2, 1, 1]}},
    ),
    Case(
        "degrees and samples",
        ("train.micro_batch=1 ", "2 groups of parallel.tp=2", "a multiple of 2"),
        {"parallel": {"tp": 2, "tensor_degrees": [2, 1, 1, 2]}, "train": {"micro_batch": 1}},
    ),
    Case("layers and pp", ("model.layers=4", "parallel.pp=5"), {"parallel": {"pp": 5}}),
    Case(
        "batch",
        ("train.global_batch=9", "train.micro_batch=2", "parallel.dp=2", "8 or 12"),
        {"train": {"global_batch": 9}, "parallel": {"dp": 2}},
    ),
    Case(
        "shares of one",
        ("parallel.zero=1", "parallel.dp=1 ", "2 or more"),
        {"parallel": {"zero": 1, "tp": 2}},
    ),
    Case(
        "shares among one",
        ("parallel.zero=3", "parallel.dp=1 ", "2 or more"),
        {"parallel": {"zero": 3, "pp": 2}},
    ),
    Case(
        "shards that do not divide",
        ("parallel.shards=3", "parallel.dp=4", "2, 4"),
        {"parallel": {"zero": 3, "dp": 4, "shards": 3}},
    ),
    Case(
        "shards of nothing",
        ("parallel.shards=2", "parallel.zero of 1 or more"),
        {"parallel": {"dp": 4, "shards": 2}},
    ),
    Case(
        "shards of a changing number",
        ("parallel.shards=2", "elastic.max_ranks", "to 0"),
        {"parallel": {"zero": 3, "dp": 4, "shards": 2}, "elastic": {"max_ranks": 4}},
    ),
    Case("no such ZeRO", ("parallel.zero=4", "at most 3"), {"parallel": {"zero": 4, "dp": 2}}),
    Case("pieces of a sample", ("model.sequence=", "2 x parallel.cp=7", "of 14"), {"parallel": {"cp": 7}}),
    Case(
        "experts over ranks",
        ("parallel.ep=4", "model.experts=6", "1, 2, 3, 6"),
        {"model": {"family": "moe", "experts": 6, "top_k": 2}, "parallel": {"dp": 4, "ep": 4}},
    ),
    Case(
        "one glob, not in a list",
        ("data.files='*.txt'", "must be a list", '["*.txt"]'),
        {"data": {"files": "*.txt"}},
    ),
    Case(
        "ranks for experts of a dense model",
        ("parallel.ep=2", "model.experts=0", "parallel.ep to 1", "multiple of 2"),
        {"parallel": {"dp": 2, "ep": 2}},
    ),
    Case(
        "a mixture without experts",
        ("model.family moe", "model.experts=0", "set model.experts"),
        {"model": {"family": "moe", "top_k": 2}},
    ),
    Case(
        "more ranks for experts than there are",
        ("parallel.ep=4", "parallel.dp x parallel.cp = 2 x 1", "one of 1, 2"),
        {"model": {"family": "moe", "experts": 8, "top_k": 2}, "parallel": {"dp": 2, "ep": 4}},
    ),
    Case(
        "positions of documents that see each other",
        ("data.restart_positions=true", "data.document_mask to true"),
        {"data": {"restart_positions": True}},
    ),
    Case(
        "more ranks than CPUs",
        ("4096 ranks", "CPUs", "parallel.dp"),
        {"parallel": {"dp": 4096}, "train": {"global_batch": 8192}},
    ),
    Case("run exists", ("runs/run", "--resume", "--overwrite"), prepare=_other_run),
    Case("nothing to resume", ("runs/run", "--resume"), options=("--resume",)),
    Case("resume and overwrite", ("--resume", "--overwrite"), options=("--resume", "--overwrite")),
    Case("report into nowhere", ("--report", "nowhere"), options=("--report", "nowhere/report.json")),
    Case(
        "Triton in fp64",
        ("train.kernels='triton'", "train.dtype='fp64'", "torch"),
        {"train": {"kernels": "triton", "dtype": "fp64"}},
    ),
    Case(
        "unknown kind of layer",
        ("model.pattern='layer wide'", "'wide'", "model.layer.wide", "or use layer"),
        {"model": {"pattern": "layer wide"}},
    ),
    Case(
        "kind that is not used",
        ("model.layer.wide='m:C'", "model.pattern='layer'", "leave it out"),
        {"model": {"layer": {"wide": "m:C"}}},
    ),
    Case(
        "pattern and layers",
        ("model.pattern='2*layer wide'", "3 layers", "model.layers=4", "3 or 6"),
        {"model": {"pattern": "2*layer wide", "layer": {"wide": "m:C"}}},
    ),
    Case("layer called head", ("model.pattern='layer head'", "'head'"), {"model": {"pattern": "layer head"}}),
    Case("odd name of a layer", ("model.pattern='a+b'", "letters"), {"model": {"pattern": "a+b"}}),
    Case("no layers", ("model.pattern=' '", "'2*layer wide'"), {"model": {"pattern": " "}}),
    Case("layer that is a list", ("model.layer", "file.py:Class"), {"model": {"layer": ["m:C"]}}),
    Case(
        "unknown layer by name",
        ("model.layer.wide='nowhere:Layer'", "package.module:Class"),
        {"model": {"layer": {"wide": "nowhere:Layer"}, "pattern": "layer wide"}},
    ),
    Case("unknown layer", ("model.layer", "package.module:Class"), {"model": {"layer": "nowhere:Layer"}}),
    Case(
        "missing schedule file",
        ("overlap.schedule_file", "none.txt"),
        {"overlap": {"schedule_file": "none.txt"}},
    ),
    Case(
        "rank without vocabulary",
        ("model.vocabulary=258", "parallel.tp=128", "384"),
        {"model": {"heads": 128, "hidden": 256, "vocabulary": 258, "ffn": 256}, "parallel": {"tp": 128}},
    ),
    Case(
        "schedule without backward",
        ("overlap.schedule_file", "forward.txt", "no backward programs"),
        {"overlap": {"schedule_file": "forward.txt"}},
        prepare=_write(
            "forward.txt",
            b"braid schedule 6\nname f\nstages 1\nchunks 1\nmicro_batches 4\nunit 0\nstage 0\n F0.0\n",
        ),
    ),
    Case(
        "schedule of another version",
        ("braid schedule 6", "braid schedule 7"),
        {"overlap": {"schedule_file": "old.txt"}},
        prepare=_write("old.txt", b"braid schedule 7\nname megatron\n"),
    ),
]


def _check(folder: Path, case: Case, *arguments: str) -> None:
    before = {path for path in folder.rglob("*") if "data" not in path.parts}
    outcome = braid(folder, *arguments, timeout=100)
    assert outcome.code == 2, outcome.output + outcome.errors
    assert "Traceback" not in outcome.output + outcome.errors
    assert outcome.errors.startswith("braid: ")
    for text in case.says:
        assert text in outcome.errors
    after = {path for path in folder.rglob("*") if "data" not in path.parts}
    assert {p for p in after - before if p.name != "runs"} == set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_input(case: Case, tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_config(tmp_path, **case.config)
    case.prepare(tmp_path)
    _check(tmp_path, case, "train", "run.yaml", *case.options)


def test_config_file_missing_or_broken(tmp_path: Path) -> None:
    _check(tmp_path, Case("missing", ("absent.yaml",)), "train", "absent.yaml")
    (tmp_path / "broken.yaml").write_text("train: [unclosed\n")
    _check(tmp_path, Case("broken", ("broken.yaml", "YAML")), "train", "broken.yaml")
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    _check(tmp_path, Case("list", ("list.yaml", "keys and values")), "train", "list.yaml")


TAGS = {
    "apply": "!!python/object/apply:os.mkdir ['ran']",
    "new": "!!python/object/new:os.mkdir ['ran']",
    "name": "!!python/name:os.mkdir",
    "module": "!!python/module:os",
    "object": "!!python/object:pathlib.PurePath {}",
}
"""What unsafe readers of YAML understand; the first two run something."""

READERS = {
    "train": ("train", "evil.yaml"),
    "submit": ("submit", "evil.yaml"),
    "kubernetes": ("kubernetes", "evil.yaml", "--image", "x", "--claim", "y"),
    "cluster": ("plan", "run.yaml", "--cluster", "evil.yaml"),
    "plan": ("simulate", "evil.yaml"),
    "overlap.plan": (
        "schedule",
        "run.yaml",
        "--set",
        "overlap.schedule=braid",
        "--set",
        "overlap.plan=evil.yaml",
    ),
}


@pytest.mark.parametrize("tag", TAGS)
def test_yaml_tags_run_nothing(
    tmp_path: Path, tag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever a file or an option of YAML is read."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    (tmp_path / "evil.yaml").write_text(f"name: {TAGS[tag]}\n")
    option = ("train", "run.yaml", "--set", f"name={TAGS[tag]}")
    for command in (*READERS.values(), option):
        with pytest.raises(SystemExit) as left:
            main(list(command))
        assert left.value.code == 2, command
        errors = capsys.readouterr().err
        assert "YAML" in errors, command
        assert ("evil.yaml" if command is not option else "--set") in errors, command
    assert not (tmp_path / "ran").exists()
    if tag in ("apply", "new"):
        yaml.unsafe_load((tmp_path / "evil.yaml").read_text())
        assert (tmp_path / "ran").exists(), "the tag is harmless: too easy a test"


@pytest.mark.parametrize(
    "name", ["../elsewhere", "..", ".", "a/b", "/etc", "-x", "", "a" * 65, "a b", "a\n", "a\x00b", "ä"]
)
@pytest.mark.parametrize("command", ["train", "submit", "kubernetes"])
def test_names_that_lead_elsewhere(
    tmp_path: Path,
    command: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, name=name)
    options = ("--image", "x", "--claim", "y") if command == "kubernetes" else ()
    with pytest.raises(SystemExit) as left:
        main([command, "run.yaml", *options])
    assert left.value.code == 2
    assert f"name={name!r}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_run_that_is_a_link_elsewhere(tmp_path: Path) -> None:
    """A name that is good, but whose directory lies outside of ``runs``; nothing is written there."""
    (tmp_path / "runs").mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "runs" / "run").symlink_to(outside, target_is_directory=True)
    with pytest.raises(ConfigError, match=r"name='run' leads out of runs="):
        RunDirectory(parse_config({"runs": str(tmp_path / "runs")}), resume=False, overwrite=True)
    assert list(outside.iterdir()) == []


def test_run_directory_in_use(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_config(tmp_path)
    lock = tmp_path / "runs" / "run" / ".lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _check(tmp_path, Case("in use", ("runs/run", "in use", "--set name=")), "train", "run.yaml")


def test_damaged_checkpoints(tmp_path: Path) -> None:
    """Truncated, flipped, missing: refused by name; an older good one is used, and that is said aloud."""
    write_corpus(tmp_path)
    write_config(tmp_path, checkpoint={"every": 2})
    assert braid(tmp_path, "train", "run.yaml").code == 0
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    newest = next(iter(sorted((checkpoints / "step-4").glob("*.distcp"))))
    newest.write_bytes(newest.read_bytes()[:-7])
    again = braid(tmp_path, "train", "run.yaml", "--resume", "--set", "checkpoint.keep=9", "--until", "3")
    assert again.code == 0, again.errors
    assert "step-4" in again.output
    assert "falling back to step 2" in again.output
    for damaged in checkpoints.glob("step-*/*.distcp"):
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    case = Case("all damaged", ("step-3", "step-2", "checksum", "no older checkpoint"))
    _check(tmp_path, case, "train", "run.yaml", "--resume")


def test_other_data_or_model_cannot_resume(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_config(tmp_path)
    assert braid(tmp_path, "train", "run.yaml", "--until", "2").code == 0
    for override, says in (
        ("model.layers=2", ("layers=4", "layers=2")),
        ("train.seed=7", ("seed=0", "7", "sample order")),
        ("train.global_batch=4", ("global_batch=8", "4")),
        ("model.pattern=layer own", ("pattern=layer,", "pattern=layer own")),
    ):
        arguments = ["train", "run.yaml", "--resume", "--set", override]
        if "pattern" in override:
            example = ROOT / "docs" / "examples" / "parallel_layer.py"
            arguments += ["--set", f"model.layer.own={example}:ParallelLayer"]
        _check(tmp_path, Case(override, says), *arguments)


def test_ray_cluster_too_small(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_config(tmp_path, cluster={"launcher": "ray"}, parallel={"dp": 64}, train={"global_batch": 128})
    case = Case("too small", ("64 ranks", "CPUs", "parallel.dp"))
    process = start(tmp_path, "train", "run.yaml")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert all(text in errors for text in case.says)
    assert left_running(process.pid) == []


def test_unreachable_address(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_config(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        options = ("--launcher", "ray", "--address", f"127.0.0.1:{port}")
        case = Case("unreachable", (f"127.0.0.1:{port}", "does not answer", "ray start"))
        _check(tmp_path, case, "train", "run.yaml", *options)
    case = Case("not an address", ("nowhere", "HOST:PORT"))
    _check(tmp_path, case, "train", "run.yaml", "--launcher", "ray", "--address", "nowhere")
