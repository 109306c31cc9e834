"""``braid slurm``: writes a script for Slurm's ``sbatch`` around torchrun or Ray's symmetric run."""

import math
import re
import shlex
import sys
from pathlib import Path
from string import Template
from typing import Annotated, Final, Literal

import typer

from braid.actors.config import ConfigError
from braid.jobs.output import check_outputs, print_or_write
from braid.jobs.usage import ConfigFile, Overrides, read_config

SAVE_SECONDS: Final = 180
"""Seconds before the job's time limit at which the run is asked to save a checkpoint and to end."""

_TIME: Final = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")
"""Time limits that Slurm takes, from minutes to days-hours:minutes:seconds."""
_SCRIPT: Final = Template("""\
#!/bin/bash
# Written by `braid slurm`. It goes on from the newest checkpoint when it is submitted again, or requeued.
$directives

set -euo pipefail
bin=$${BRAID_BIN:-$bin}  # where this environment's commands are; the same on all nodes
nodes=($$(scontrol show hostnames "$$SLURM_JOB_NODELIST"))
port=$$((20000 + SLURM_JOB_ID % 20000))  # of the rendezvous on the first node; jobs on a node differ
$start
""")
_TORCHRUN: Final = Template("""\
# A signal reaches all of torchrun's processes; the run saves a checkpoint within the time to shut down.
exec srun --kill-on-bad-exit=1 "$$bin/torchrun" \\
  --nnodes $nodes --nproc-per-node $ranks --shutdown-timeout $seconds \\
  --rdzv-backend c10d --rdzv-id "$$SLURM_JOB_ID" --rdzv-endpoint "$${nodes[0]}:$$port" \\
  -m braid train $arguments --resume-if-begun""")
_RAY: Final = Template("""\
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
RAY_AUTH_TOKEN=$$("$$bin/python" -c 'import secrets; print(secrets.token_hex(32))')
address="$${nodes[0]}:$$port"
export bin address
# Ray's own processes ignore the signals on which `braid train` saves a checkpoint; Ray ends after it. At its
# end `ray symmetric-run` stops all of this user's Ray processes on these nodes.
exec srun --kill-on-bad-exit=1 bash -c 'trap "" TERM INT; exec "$$bin/ray" symmetric-run \\
  --address "$$address" --min-nodes $nodes $room -- \\
  "$$bin/braid" train "$$@" --address "$$address" --resume-if-begun' braid $arguments""")


def slurm(
    config: ConfigFile,
    nodes: Annotated[int, typer.Option(help="Number of nodes.", min=1)],
    overrides: Overrides = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs of a node; default: those that the layout needs.", min=1)
    ] = None,
    time: Annotated[str | None, typer.Option(help="Limit, as in 12:00:00 or 2-00:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition of the cluster.")] = None,
    account: Annotated[str | None, typer.Option(help="Account that pays.")] = None,
    launcher: Annotated[
        Literal["ray", "torchrun"], typer.Option(help="What starts the ranks on all nodes.")
    ] = "torchrun",
    output: Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
) -> None:
    """Write a script for Slurm's sbatch: the run on so many nodes, with torchrun or Ray."""
    check_outputs(output=output)
    run = read_config(config, overrides)
    words = [str(config.absolute()), *(word for one in overrides or [] for word in ("--set", one))]
    options = {"time": time, "partition": partition, "account": account}
    ranks, cluster = run.layout().ranks, run.cluster
    if ranks % nodes:
        raise ConfigError(
            f"--nodes {nodes} does not divide the layout's {ranks} ranks evenly; change --nodes, or the "
            f"degrees in parallel"
        )
    each = ranks // nodes
    on_gpus = cluster.device != "cpu"
    if not on_gpus and gpus_per_node is not None:
        raise ConfigError(f"--gpus-per-node {gpus_per_node} and cluster.device=cpu: leave one of both out")
    if on_gpus and each > (gpus_per_node or each):
        raise ConfigError(
            f"--gpus-per-node {gpus_per_node} is less than the {each} ranks of a node; the layout's {ranks} "
            f"ranks need --nodes {-(-ranks // (gpus_per_node or each))}, or smaller degrees in parallel"
        )
    if cluster.address is not None:
        raise ConfigError(
            f"cluster.address={cluster.address!r}: the script starts a cluster of its own; leave it out"
        )
    given = cluster.launcher if "launcher" in cluster.model_fields_set else None
    if given is not None and (given == "ray") != (launcher == "ray"):
        raise ConfigError(
            f"cluster.launcher={given!r} does not go with --launcher {launcher}; leave cluster.launcher out"
        )
    for name, value in options.items():
        if value is not None and (not value or any(letter.isspace() for letter in value)):
            raise ConfigError(f"--{name} {value!r} must be a word, as sbatch takes it")
    if time is not None and not _TIME.fullmatch(time):
        raise ConfigError(
            f"--time {time} must be minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
            f"days-hours:minutes or days-hours:minutes:seconds, such as 12:00:00"
        )
    cpus = max(1, math.ceil(each * cluster.cpus_per_rank))
    gpus = (gpus_per_node or each) if on_gpus else None
    wanted = {
        "job-name": run.name,
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        "gpus-per-node": gpus and str(gpus),
        **options,
        "output": f"{run.name}-%j.out",
        "signal": f"TERM@{SAVE_SECONDS}",
        "chdir": str(Path.cwd()),
    }
    room = f"--num-cpus {cpus}" + (f" --num-gpus {gpus}" if gpus else "")
    template = _RAY if launcher == "ray" else _TORCHRUN
    start = template.substitute(
        nodes=nodes, ranks=each, seconds=SAVE_SECONDS - 20, room=room, arguments=shlex.join(words)
    )
    directives = [f"#SBATCH --{name}={value}" for name, value in wanted.items() if value is not None]
    here = shlex.quote(str(Path(sys.executable).parent))
    text = _SCRIPT.substitute(directives="\n".join(directives), bin=here, start=start)
    print_or_write(output, text)
