"""``braid kubernetes``: manifests that KubeRay's published API allows, and with the run's configuration.

No Kubernetes was at hand: that an operator starts what is written here has not been tried.
"""

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.actors.config import parse_config
from tests.end_to_end.command import ROOT, braid, write_config, write_corpus
from tests.in_process import Capture, Outcome, called, refused
from tests.jobs.kuberay_schema import check

EXAMPLES = ROOT / "docs" / "kubernetes"
COMMON = ("--image", "registry.example.org/braid:0.1.0", "--claim", "shared", "--ray-version", "2.60.0")
OPTIONS = {
    "rayjob.yaml": "--set name=example --max-nodes 4",
    "raycluster.yaml": "--set name=example --kind RayCluster --max-nodes 4",
}


@pytest.fixture
def kubernetes(here: Path, capsys: Capture) -> Any:
    """``braid kubernetes run.yaml ARGUMENTS`` in this process: 4 x 8 ranks."""
    config = "name: My_run.2\nparallel: {dp: 4, tp: 8}\ndata: {files: ['data/*.jsonl']}\n"
    (here / "run.yaml").write_text(config)
    return partial(called, capsys, "kubernetes", "run.yaml", *COMMON)


def made(outcome: Outcome) -> list[Any]:
    assert (outcome.code, outcome.errors) == (0, "")
    return list(yaml.safe_load_all(outcome.output))


def test_a_job(kubernetes: Any) -> None:
    settings, job = check(made(kubernetes("--token-secret", "ray-token")))
    assert job.kind == "RayJob"
    assert job.metadata.name == "my-run-2"
    cluster, workers = job.spec.rayClusterSpec, job.spec.rayClusterSpec.workerGroupSpecs[0]
    assert cluster.authOptions.mode == "token"
    assert cluster.authOptions.secretName == "ray-token"
    assert cluster.enableInTreeAutoscaling
    assert (workers.minReplicas, workers.maxReplicas) == (0, 4)
    (worker,), (head,) = workers.template.spec.containers, cluster.headGroupSpec.template.spec.containers
    assert worker.resources.limits == {"cpu": "8", "memory": "256Gi", "nvidia.com/gpu": "8"}
    assert "nvidia.com/gpu" not in head.resources.limits
    assert cluster.headGroupSpec.rayStartParams["num-cpus"] == "0"
    for template in (workers.template, cluster.headGroupSpec.template):
        volumes = {volume.name: volume for volume in template.spec.volumes}
        assert volumes["braid"].persistentVolumeClaim == {"claimName": "shared"}
        assert volumes["config"].configMap == {"name": settings.metadata.name}
    assert yaml.safe_load(job.spec.runtimeEnvYAML)["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "120"


def test_the_configuration_that_is_mounted(kubernetes: Any, tmp_path: Path) -> None:
    paths = ("checkpoint.mirror=mirror", "model.layer=mine.py:Layer", "model.initial=weights")
    options = [word for path in paths for word in ("--set", path)]
    documents = made(kubernetes("--set", "train.steps=7", "--mount", "/shared", *options))
    assert str(tmp_path) not in str(documents), "no path of this machine"
    settings, job = check(documents)
    assert job.kind == "RayJob"
    (head,) = job.spec.rayClusterSpec.headGroupSpec.template.spec.containers
    (mount,) = [mount for mount in head.volumeMounts if mount.name == "config"]
    words = shlex.split(job.spec.entrypoint)
    assert words[:4] == ["python", "-m", "braid", "train"]
    folder, _, name = words[4].rpartition("/")
    assert (folder, [name]) == (mount.mountPath, list(settings.data))
    config = parse_config(yaml.safe_load(settings.data[name]))
    assert config.name == "My_run.2"
    assert config.runs == Path("/shared/runs")
    assert config.data.files == ("/shared/data/*.jsonl",)
    assert config.checkpoint.mirror == "/shared/mirror"
    assert (config.model.layer, config.model.initial) == ("/shared/mine.py:Layer", Path("/shared/weights"))
    assert config.train.steps == 7
    assert config.cluster.device == "cuda"
    assert config.cluster.placement_timeout_s == 1800, "nodes have to be found first"


def test_a_cluster_without_gpus_and_a_run_smaller_than_a_node(kubernetes: Any) -> None:
    options = "--kind RayCluster --no-gpus --ranks-per-node 3 --memory 500Mi --set cluster.cpus_per_rank=1.5"
    settings, cluster = check(made(kubernetes(*options.split())))
    assert cluster.kind == "RayCluster"
    (workers,) = cluster.spec.workerGroupSpecs
    assert workers.maxReplicas == 11, "32 ranks, 3 on a node"
    assert workers.template.spec.containers[0].resources.requests == {"cpu": "4500m", "memory": "1500Mi"}
    assert parse_config(yaml.safe_load(settings.data["run.yaml"])).cluster.device == "cpu"
    assert cluster.spec.authOptions.secretName is None
    _, job = check(made(kubernetes("--set", "parallel.dp=1", "--set", "parallel.tp=2")))
    (workers,) = job.spec.rayClusterSpec.workerGroupSpecs
    assert workers.maxReplicas == 1
    assert workers.template.spec.containers[0].resources.limits["nvidia.com/gpu"] == "2"


WRONG = {
    "--kind Deployment": "'Deployment' is not one of",
    "--max-nodes 3": "--max-nodes 3 must be 4 or more, for 32 ranks",
    "--memory 1e9": "--memory 1e9",
    "--mount data": "--mount data",
    "--set cluster.launcher=processes": "cluster.launcher='processes'",
    f"--set name={'x' * 48}": "too long for Kubernetes",
    "--output nowhere/x.yaml": "--output nowhere/x.yaml",
}


@pytest.mark.parametrize("options", WRONG)
def test_what_cannot_be(kubernetes: Any, options: str) -> None:
    outcome = kubernetes(*options.split())
    refused(outcome, WRONG[options])
    assert outcome.output == ""


@pytest.mark.parametrize("name", OPTIONS)
def test_examples(kubernetes: Any, name: str, update_golden: bool) -> None:
    """The manifests in docs/ are what the command writes; their configurations may be older, but are good."""
    text = kubernetes(*OPTIONS[name].split()).output
    if update_golden:
        (EXAMPLES / name).write_text(text, encoding="utf-8")
    shown, written = [list(yaml.safe_load_all(t)) for t in ((EXAMPLES / name).read_text("utf-8"), text)]
    assert shown[1] == written[1]
    settings, _ = check(shown)
    assert parse_config(yaml.safe_load(settings.data["run.yaml"])).name == "example"


@pytest.mark.slow
def test_a_job_that_is_started_again(tmp_path: Path) -> None:
    """The manifest's ``--resume-if-begun`` replaces a try that saved nothing."""
    write_corpus(tmp_path)
    write_config(tmp_path)
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("of a try that died before it saved anything\n")
    done = braid(tmp_path, "train", "run.yaml", "--resume-if-begun", "--until", "1")
    assert done.code == 0, done.errors
