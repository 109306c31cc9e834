"""Wrong input, everywhere: one line that names it and its remedy, exit code 2, and nothing is left behind.

Of every command's mistakes there is one table; what is found only in a run or a checkpoint stands in
`tests/end_to_end/test_wrong_input.py` and `tests/jobs/test_checkpoint_commands.py`.
"""

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.jobs.mistakes import Made, make

ROOT = Path(__file__).resolve().parents[2]

FIRST = """\
name: first
model: {family: llama, hidden: 64, layers: 4, heads: 4, sequence: 32}
data: {files: [corpus.txt]}
train: {steps: 20, global_batch: 8, micro_batch: 2, lr: 1.0e-3}
"""
NODES_CONFIG = """\
model: {hidden: 32, layers: 4, heads: 4, sequence: 32}
data: {files: [corpus.txt]}
train: {steps: 4, global_batch: 12, micro_batch: 1, deterministic_reduction: true}
parallel: {dp: 2, zero: 3}
cluster: {launcher: ray}
elastic: {max_ranks: 4}
"""
CLUSTER = """\
name: mine
nodes: 1
gpus_per_node: 8
gpu: A100
intra: nvlink-600
contention: nvlink
"""
SCHEDULE = "braid schedule 6\nname f\nstages 1\nchunks 1\nmicro_batches 4\nunit 0\n"
FILES = {
    "first.yaml": FIRST,
    "old.yaml": FIRST.replace("first", "old"),
    "runs/old/config.yaml": "name: old\n",
    "runs/old/checkpoints/none": "",
    "runs/spoken/logs/rank-0.log": "",
    "pickles/config.json": "{}",
    "nodes.yaml": NODES_CONFIG,
    "broken.yaml": "train: [unclosed\n",
    "list.yaml": "- a\n- b\n",
    "preset.yaml": "model: {preset: llama3-8b}\n",
    "huge.yaml": "model: {preset: llama-3.1-405b}\ndata: {files: [corpus.txt]}\ncluster: {device: cpu}\n",
    "glob.yaml": "data: {files: '*.txt'}\n",
    "auto.yaml": "parallel: auto\n",
    "forward.txt": f"{SCHEDULE}stage 0\n F0.0\n",
    "newer.txt": "braid schedule 7\nname megatron\n",
    "mine.yaml": CLUSTER,
    "odd.yaml": CLUSTER.replace("nodes: 1", "node: 1"),
    "plan.yaml": "braid_plan: 9\n",
    "bad.json": "{",
    "part.json": '{"source": "measured: x", "solo_ns": {"layer/qkv": 5}}',
}
"""What lies in the folder of all calls, beside ``corpus.txt``."""


@dataclass(frozen=True)
class Mistake:
    """A call, and the texts of what is said of it, between bars; ``torch``: not found without it."""

    call: str
    says: str
    torch: bool = False


def wrong(keys: str, says: str, torch: bool = False) -> Mistake:
    """Keys of a configuration to train with."""
    words = (f"--set {shlex.quote(word)}" for word in shlex.split(keys))
    return Mistake(f"train first.yaml {' '.join(words)}", says, torch)


MOE = "model.family=moe model.top_k=2"
NODES = "drill nodes.yaml --faults"
TENSORS = "drill first.yaml --launcher processes --set parallel.tp=2 --faults"
SAY = "generate runs/old --prompt x"
SCORE = "evaluate runs/old --tasks arc_easy"
ON_RAY = "train first.yaml --launcher ray --address"

MISTAKES = [
    # commands, options and files
    Mistake("trian first.yaml", "No such command 'trian'. Did you mean 'train', 'trace'; see braid --help"),
    Mistake("run first.yaml", "No such command 'run'; see braid --help"),
    Mistake("checkpoint ls", "No such command 'ls'. Did you mean 'list'; see braid checkpoint"),
    Mistake("train", "Missing argument 'CONFIG'; see braid train --help"),
    Mistake("train first.yaml --overwite", "No such option: --overwite|--overwrite); see braid train --help"),
    Mistake("train first.yaml --launcher proc", "'--launcher': 'proc'|'ray', 'processes'; see braid train"),
    Mistake("kubernetes first.yaml", "Missing option '--image'; see braid kubernetes --help"),
    Mistake("train first.yml", "first.yml does not exist|did you mean first.yaml?"),
    Mistake("train broken.yaml", "broken.yaml is not valid YAML|line 1"),
    Mistake("train list.yaml", "list.yaml|keys and values"),
    Mistake("train glob.yaml", "data.files='*.txt'|must be a list|[\"*.txt\"]"),
    Mistake("train preset.yaml", "model.preset 'llama3-8b' is no preset; did you mean 'llama-3.1-8b'?"),
    Mistake("train auto.yaml --set parallel.tp=2", "parallel is 'auto'|--set 'parallel={tp: 2}'"),
    Mistake("train first.yaml --set train.lr", "--set|train.lr|key=value"),
    # keys and values
    wrong("train.lr=.nan", "train.lr|nan"),
    wrong("train.betas=[1.5,0.95]", "train.betas[0]=1.5|at least 0, < 1"),
    wrong("train.dtype=fp16", "train.dtype='fp16'|did you mean 'bf16'?"),
    wrong("train.recompute=some", "train.recompute|some|selective"),
    wrong("train.reduce_dtype=fp16", "train.reduce_dtype='fp16'|must be bf16, or null"),
    wrong("train.reduce_dtype=bf16 train.dtype=fp64", "train.dtype='fp64'|train.reduce_dtype to null"),
    wrong("train.reduce_dtype=bf16 train.deterministic_reduction=true", "deterministic_reduction=true|leave"),
    wrong("train.kernels=triton train.dtype=fp64", "train.kernels='triton'|train.dtype='fp64'|torch"),
    wrong("train.optimizer=adam", "train.optimizer='adam'|adamw, muon, adamw_8bit|did you mean 'adamw'?"),
    wrong("train.optimizer=adamw_8bit train.dtype=fp64", "optimizer='adamw_8bit'|dtype='fp64'|or bf16"),
    wrong("train.momentum=0.9", "momentum=0.9 does not go with optimizer='adamw'|to muon"),
    wrong("train.momentum=1 train.optimizer=muon", "train.momentum=1|at least 0, < 1"),
    wrong("train.average=1", "train.average=1|at least 0, < 1"),
    wrong("train.schedule=linar", "train.schedule='linar'|did you mean 'linear'?"),
    wrong("train.decay_steps=5", "decay_steps=5 does not go with schedule='cosine'|to stable_decay"),
    wrong("train.schedule=stable_decay train.decay_steps=-1", "train.decay_steps=-1|at least 0"),
    wrong(
        "train.schedule=stable_decay train.steps=20 train.decay_steps=15 train.warmup_steps=10",
        "decay_steps=15 and warmup_steps=10 are more than steps=20|lower train.decay_steps",
    ),
    wrong("checkpoint.mirror=sftpp://host/run", "checkpoint.mirror|'sftpp'|did you mean 'sftp'?"),
    wrong("parallel.late_layers=1", "parallel.late_layers=1: this key is gone|raise parallel.zero"),
    wrong("data.restart_positions=true", "data.restart_positions=true|data.document_mask=true"),
    # files that a configuration names
    wrong("data.files=[absent.txt]", "data.files|absent.txt|correct the path"),
    wrong("data.tokenizer=absent.json", "data.tokenizer|absent.json|bytes"),
    wrong("model.initial=absent", "absent|config.json"),
    wrong("model.initial=.", "config.json cannot be read|`braid checkpoint export RUN` writes it"),
    wrong("overlap.profile=absent.json", "absent.json|braid profile"),
    wrong("overlap.schedule_file=absent.txt", "overlap.schedule_file|absent.txt"),
    wrong("overlap.schedule_file=forward.txt", "forward.txt|no backward programs"),
    wrong("overlap.schedule_file=newer.txt", "braid schedule 6|braid schedule 7"),
    # models
    wrong("model.heads=5", "model.hidden=64|model.heads=5"),
    wrong(MOE, "model.family moe|model.experts=0|set model.experts"),
    wrong("'model.pattern=layer wide'", "='layer wide'|'wide'|model.layer.wide|or use layer"),
    wrong("model.layer.wide=m:C", "model.layer.wide='m:C'|model.pattern='layer'|leave it out"),
    wrong("'model.pattern=\" \"'", "model.pattern=' '|'2*layer wide'"),
    wrong("model.layer=[m:C]", "model.layer|file.py:Class"),
    wrong("model.layer=nowhere:Layer", "model.layer|package.module:Class", torch=True),
    wrong("model.lora=8", "model.lora=8|keys and values"),
    wrong("'model.lora={rnak: 4}'", "model.lora|'rnak'|did you mean 'rank'?"),
    wrong("'model.lora={rank: 0}'", "model.lora: rank=0 must be at least 1"),
    wrong("'model.lora={rank: 2.5}'", "model.lora: rank=2.5 must be a whole number"),
    wrong("'model.lora={alpha: -1}'", "model.lora: alpha=-1 must be greater than zero"),
    wrong("'model.lora={targets: []}'", "model.lora: targets=[]|name some of q, k, v, o"),
    wrong("'model.lora={targets: [q, vv]}'", "model.lora: targets: 'vv'|did you mean 'v'?"),
    wrong("'model.lora={targets: [q_proj]}'", "model.lora: targets: 'q_proj'|did you mean 'q'?"),
    wrong("'model.lora={targets: [q, q]}'", "model.lora: targets=['q', 'q'] names a matrix twice"),
    wrong("'model.lora={targets: [gate]}' model.family=gpt", "'gate'|family gpt|without gate: leave it out"),
    wrong(f"'model.lora={{targets: [q, up]}}' {MOE} model.experts=4", "'up'|experts|leave it out"),
    wrong(
        f"'model.lora={{targets: [up]}}' {MOE} model.experts=4 'model.pattern=dense layer'",
        "model.lora.targets=['up']|the kind 'layer'|add one of q, k, v, o",
    ),
    wrong(
        f"'model.lora={{}}' {MOE} model.experts=4 model.balance_rate=0.1",
        "model.balance_rate=0.1|model.lora|leave one out",
    ),
    wrong("'model.lora={}' model.layer=m:C", "model.lora|model.layer='m:C'|leave one out"),
    Mistake("train huge.yaml", "weights, gradients and optimizer of 405.85 B parameters|braid plan"),
    # layouts
    wrong("parallel.tp=3", "model.heads=4|parallel.tp to one of 1, 2, 4"),
    wrong("parallel.tp=2 model.kv_heads=1", "model.kv_heads=1|parallel.tp=2"),
    wrong(f"parallel.tp=2 {MOE} model.experts=4 model.expert_ffn=45", "model.expert_ffn=45|parallel.tp=2"),
    wrong(
        "parallel.tp=128 model.heads=128 model.hidden=256 model.ffn=256 model.vocabulary=258",
        "model.vocabulary=258|parallel.tp=128|384",
    ),
    wrong("parallel.pp=9", "model.layers=4|parallel.pp=9"),
    wrong(
        "parallel.pp=2 model.layers=3 overlap.schedule=megatron overlap.pipeline=folded",
        "model.layers=3|4 chunks of parallel.pp=2|at least 4 layers",
    ),
    wrong("parallel.cp=7", "model.sequence=|2 x parallel.cp=7|of 14"),
    wrong("parallel.dp=2 train.global_batch=9", "train.global_batch=9|train.micro_batch=2|8 or 12"),
    wrong("parallel.dp=512 train.global_batch=2048", "512 ranks|CPUs|lower|parallel.dp"),
    wrong("parallel.zero=1 parallel.tp=2", "parallel.zero=1|parallel.dp=1;|2 or more"),
    wrong("parallel.zero=3 parallel.dp=4 parallel.shards=3", "parallel.shards=3|parallel.dp=4|2, 4"),
    wrong("parallel.dp=4 parallel.shards=2", "parallel.shards=2|parallel.zero of 1 or more"),
    wrong("parallel.zero=3 parallel.dp=4 parallel.shards=2 elastic.max_ranks=4", "elastic.max_ranks|to 0"),
    wrong("parallel.dp=2 parallel.ep=2", "parallel.ep=2|model.experts=0|parallel.ep to 1"),
    wrong(f"parallel.dp=4 parallel.ep=4 {MOE} model.experts=6", "model.experts=6|1, 2, 3, 6"),
    wrong(f"parallel.dp=2 parallel.ep=4 {MOE} model.experts=8", "parallel.dp x parallel.cp = 2 x 1|1, 2"),
    wrong("parallel.tp=2 'parallel.tensor_degrees=two 3*1'", "'two' must be a degree|12*4 12*2"),
    wrong("parallel.tp=2 parallel.tensor_degrees=[2,1,1]", "has 3 degrees|model.layers=4"),
    wrong(
        "parallel.tp=2 parallel.tensor_degrees=[2,1,1,2] train.micro_batch=1",
        "train.micro_batch=1 |2 groups of parallel.tp=2|a multiple of 2",
    ),
    wrong(
        "parallel.auto=true parallel.tp=2 parallel.tensor_degrees=[2,1,1,2]",
        "tensor_degrees=[2, 1, 1, 2]|auto=true|parallel.auto to false",
    ),
    wrong(
        "parallel.tp=2 parallel.tensor_degrees=auto 'train.recompute=2*full 2*none'",
        "train.recompute='2*full 2*none'|parallel.tensor_degrees='auto'|both to auto",
    ),
    # plans
    Mistake("train first.yaml --plan absent.yaml", "plan absent.yaml|braid plan --output"),
    # runs
    Mistake("train old.yaml", "runs/old already holds a run|--resume|--overwrite"),
    Mistake("train old.yaml --resume", "there is no checkpoint in|start without --resume"),
    Mistake("train first.yaml --resume", "there is no run in|start it without --resume"),
    Mistake("train first.yaml --resume --overwrite", "--resume|--overwrite"),
    Mistake("train first.yaml --resume-if-begun --overwrite", "--resume-if-begun exclude each other"),
    Mistake(f"{ON_RAY} nowhere", "nowhere|HOST:PORT", torch=True),
    Mistake(f"{ON_RAY} 127.0.0.1:1", "127.0.0.1:1|does not answer|ray start", torch=True),
    Mistake("train first.yaml --report no/r.json", "--report no/r.json: the folder no does not exist"),
    Mistake("report runs/absent", "runs/absent|give a run's"),
    # other commands
    Mistake("logs none", "none holds no run; give a directory such as runs/NAME"),
    Mistake("logs runs/spoken --rank 1", "--rank 1: runs/spoken has logs of ranks 0"),
    Mistake("logs runs/old", "runs/old/logs holds no logs"),
    Mistake("drill first.yaml --faults kil-save", "did you mean 'kill-save'?"),
    Mistake(f"{TENSORS} cut-gather", "--faults cut-gather: |--set parallel.zero=1"),
    Mistake(f"{NODES} node-lost --launcher processes", "need cluster.launcher=ray"),
    Mistake(f"{NODES} node-lost --set elastic={{}}", "--set elastic.max_ranks=4"),
    Mistake(f"{NODES} node-lost --set cluster.address=h:1", "leave out cluster.address='h:1'"),
    Mistake(
        f"{NODES} node-lost --set train.deterministic_reduction=false", "--set train.deterministic_reduction"
    ),
    Mistake(f"{NODES} node-lost --set elastic.min_ranks=3", "has 2 ranks, elastic allows 3 to 4", torch=True),
    Mistake(
        f"{NODES} node-lost --count 2", "0 nodes that join and 2 that leave, beginning with 2", torch=True
    ),
    Mistake(f"{NODES} node-lost,kill-host", "drill them one after the other"),
    Mistake("plan llama3-8b", "llama3-8b is neither|did you mean 'llama-3.1-8b'?"),
    Mistake("plan llama-3.1-8b --cluster h100x8", "cluster 'h100x8' is no preset; did you mean 'h100'?"),
    Mistake("plan llama-3.1-8b --cluster absent.yaml", "cluster absent.yaml cannot be read"),
    Mistake("plan llama-3.1-8b --output no/plan.yaml", "--output no/plan.yaml: the folder no does not exist"),
    Mistake("plan llama-3.1-8b --cluster mine.yaml --set 'parallel={dp: 8}'", "the layout dp 8 needs"),
    Mistake("plan llama-3.1-405b --cluster a100x8", "fits on no layout of cluster a100x8: the leanest"),
    Mistake("plan first.yaml --cluster mine.yaml --set parallel=some", "be the word auto"),
    Mistake(
        "simulate first.yaml --cluster mine.yaml --set parallel.tp=4", "mine has 1 x 8 = 8; set parallel.dp=2"
    ),
    Mistake("compare first.yaml runs", "first.yaml and runs: a trace is compared only with a trace"),
    Mistake("simulate first.yaml --schedule fsdp", "--schedule fsdp|here that is parallel.zero=3"),
    Mistake("simulate first.yaml --schedule magic", "--schedule magic|must be one of megatron"),
    Mistake("simulate plan.yaml", "plan.yaml"),
    Mistake("explain absent.yaml", "absent.yaml|braid plan --output"),
    Mistake("explain first.yaml", "first.yaml is no plan: the key braid_plan is missing"),
    Mistake("simulate first.yaml --cluster mine.yaml --set parallel.tp=8 --profile bad.json", "bad.json"),
    Mistake(
        "simulate first.yaml --cluster mine.yaml --set parallel.tp=4 --set parallel.pp=2 --profile part.json",
        "no cost of operator",
    ),
    # models; what only a run with checkpoints shows: `tests/end_to_end/test_generate.py`
    Mistake("generate runs/absent --prompt x", "there is no run runs/absent; there are runs/old"),
    Mistake("generate pickles --prompt x", "pickles holds config.json and no safetensors"),
    Mistake(SAY, "there is no checkpoint in runs/old/checkpoints yet"),
    Mistake("generate runs/old --prompt ''", "--prompt is empty; give some text"),
    Mistake(f"{SAY} --temperature -1", "--temperature -1 must be a number from 0 on"),
    Mistake(f"{SAY} --temperature nan", "--temperature nan must be a number from 0 on"),
    Mistake(f"{SAY} --top-p 0", "--top-p 0 must be above 0 and at most 1"),
    Mistake(
        f"{SAY} --top-p 0.5 --temperature 0", "--top-p draws tokens, and --temperature 0 takes the likeliest"
    ),
    Mistake(f"{SAY} --max-tokens 0", "Invalid value for '--max-tokens'"),
    Mistake(f"{SCORE} --include-path absent", "--include-path absent is no folder"),
    Mistake(f"{SCORE} --output no/scores.json", "--output no/scores.json: the folder no does not exist"),
    Mistake(f"{SCORE} --limit 0", "Invalid value for '--limit'"),
    Mistake("generate absent --prompt x", "there is no run absent; . holds no runs"),
    Mistake("generate first.yaml --prompt x", "first.yaml is neither a run nor a checkpoint"),
    Mistake(
        "train first.yaml --set checkpoint.keep_best=true", "checkpoint.keep_best=true|train.validate_every=0"
    ),
    Mistake("train first.yaml --set checkpoint.keep_best=2", "checkpoint.keep_best=2: must be true or false"),
    # clusters; what else is wrong with one: `tests.scheduling.test_cluster`
    Mistake("simulate first.yaml --cluster odd.yaml", "unknown key 'node'; did you mean 'nodes'?"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    folder = tmp_path_factory.mktemp("mistakes")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", folder / "corpus.txt")
    before = {path for path in folder.rglob("*") if "data" not in path.parts}
    calls = [one.call for one in MISTAKES]
    found = dict(zip(calls, make([(folder, shlex.split(call)) for call in calls]), strict=True))
    assert {path for path in folder.rglob("*") if "data" not in path.parts} == before
    return found


@pytest.mark.parametrize("one", MISTAKES, ids=lambda one: one.call)
def test_one_line_with_the_remedy(made: dict[str, Made], one: Mistake) -> None:
    """Before Ray, torch or a rank are started, wherever that can be."""
    what = made[one.call]
    assert what.code == 2, what
    (line,) = what.errors.splitlines()
    assert line.startswith("braid: ")
    for text in one.says.split("|"):
        assert text in line
    if not one.torch:
        assert (what.output, what.loaded, what.started) == ("", (), ())
