"""A run as a manifest for KubeRay: a cluster that grows with the run, the run itself, its configuration.

The fields are those of the custom resources ``RayJob`` and ``RayCluster``, version ``ray.io/v1``. Probes of
liveness and readiness are not written down: KubeRay's operator gives every Ray container its own.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from braid.actors.config import Config, ConfigError
from braid.actors.config.paths import anchored
from braid.jobs.submission import STOP_SECONDS

Kind = Literal["RayJob", "RayCluster"]
CONFIG_FOLDER, CONFIG_FILE = "/etc/braid", "run.yaml"
_LONGEST_NAME = 47
"""KubeRay's limit for a RayJob: the cluster's and the pods' names are made from it."""
_NODE_SECONDS = 1800.0
"""For so long a run waits for nodes that the autoscaler has yet to find."""
_PORTS = {"gcs-server": 6379, "dashboard": 8265, "metrics": 8080}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a manifest holds beside the configuration.

    image                    with Ray and Braid in the versions used here
    ray_version              of the image
    ranks_per_node           ranks on a worker pod
    gpus                     whether a rank has a GPU
    memory_per_rank          Kubernetes' notation, such as 64Gi
    nodes                    fewest and most worker pods; the autoscaler stays between
    claim, mount             a volume claim for many writers (ReadWriteMany), and its place in all pods
    token_secret             a Secret with the key ``auth_token``; None: the operator makes one
    retries                  new clusters that are tried when the job fails; each goes on from a checkpoint
    """

    image: str
    ray_version: str
    ranks_per_node: int = 8
    gpus: bool = True
    memory_per_rank: str = "32Gi"
    nodes: tuple[int, int]
    claim: str
    mount: Path = Path("/braid")
    namespace: str | None = None
    token_secret: str | None = None
    retries: int = 2


def manifest(config: Config, setting: Setting, kind: Kind) -> str:
    """YAML for ``kubectl apply -f -``: a ConfigMap with the configuration, then the RayJob or RayCluster.

    Relative paths of the configuration are taken from the mounted volume. `ConfigError` for what cannot be.
    """
    config = _for_pods(config, setting)
    name = resource_name(config.name)
    place = {} if setting.namespace is None else {"namespace": setting.namespace}
    about = {"name": name, "labels": {"app.kubernetes.io/part-of": "braid"}, **place}
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**about, "name": f"{name}-config"},
        "data": {CONFIG_FILE: config.to_yaml()},
    }
    cluster = _cluster(config, setting, name)
    spec = cluster if kind == "RayCluster" else _job(config, setting, cluster)
    resource = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": about, "spec": spec}
    return yaml.dump_all([settings, resource], Dumper=_Plain, sort_keys=False)


class _Plain(yaml.SafeDumper):
    """Writes for people: no references to what stands elsewhere, and texts of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Plain.add_representer(str, _Plain.represent_str)


def resource_name(run: str) -> str:
    """A run's name as Kubernetes allows it: lower case, digits and dashes, begun by a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    if len(name) > _LONGEST_NAME:
        raise ConfigError(f"name={run!r} is too long for Kubernetes: at most {_LONGEST_NAME} characters")
    return name


def _for_pods(config: Config, setting: Setting) -> Config:
    if config.cluster.launcher != "ray":
        raise ConfigError(f"cluster.launcher={config.cluster.launcher!r} cannot run there; set it to ray")
    if not setting.mount.is_absolute():
        raise ConfigError(f"--mount {setting.mount} must be an absolute path")
    low, high = setting.nodes
    if not 0 <= low <= high:
        raise ConfigError(f"--min-nodes {low} and --max-nodes {high} must be 0 <= min <= max")
    needed = nodes_needed(config, setting.ranks_per_node)
    if high < needed:
        raise ConfigError(
            f"--max-nodes {high} is too few: {config.layout().ranks} ranks, {setting.ranks_per_node} on a "
            f"node, need {needed}"
        )
    patience = config.cluster.placement_timeout_s
    update = {
        "address": None,
        "device": "cuda" if setting.gpus else "cpu",
        "placement_timeout_s": max(patience, _NODE_SECONDS) if low < needed else patience,
    }
    cluster = config.cluster.model_copy(update=update)
    return anchored(config, setting.mount).model_copy(update={"cluster": cluster})


def nodes_needed(config: Config, ranks_per_node: int) -> int:
    """Worker pods for all ranks."""
    return -(-config.layout().ranks // ranks_per_node)


def _job(config: Config, setting: Setting, cluster: dict[str, Any]) -> dict[str, Any]:
    command = ["python", "-m", "braid", "train", f"{CONFIG_FOLDER}/{CONFIG_FILE}", "--resume-if-begun"]
    return {
        "entrypoint": shlex.join(command),
        "submissionMode": "K8sJobMode",
        "runtimeEnvYAML": yaml.safe_dump({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}}),
        "backoffLimit": setting.retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "rayClusterSpec": cluster,
    }


def _cluster(config: Config, setting: Setting, name: str) -> dict[str, Any]:
    low, high = setting.nodes
    ranks = setting.ranks_per_node
    cpus = max(1.0, config.cluster.cpus_per_rank * ranks)
    worker = {"cpu": _quantity(cpus), "memory": _times(setting.memory_per_rank, ranks)}
    if setting.gpus:
        worker["nvidia.com/gpu"] = str(ranks)
    token = {} if setting.token_secret is None else {"secretName": setting.token_secret}
    return {
        "rayVersion": setting.ray_version,
        "authOptions": {"mode": "token", **token},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"version": "v2", "upscalingMode": "Default", "idleTimeoutSeconds": 300},
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            # No ranks on the head: it holds the controller, the records and the driver.
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": _pod("ray-head", {"cpu": "4", "memory": "16Gi"}, setting, name, ports=_PORTS),
        },
        "workerGroupSpecs": [
            {
                "groupName": "ranks",
                "replicas": low,
                "minReplicas": low,
                "maxReplicas": high,
                "rayStartParams": {},
                "template": _pod("ray-worker", worker, setting, name, ports={}),
            }
        ],
    }


def _pod(
    container: str, resources: dict[str, str], setting: Setting, name: str, ports: dict[str, int]
) -> dict[str, Any]:
    """A pod template; limits equal requests, so that nobody else's load can take the CPU away."""
    listed = [{"name": port, "containerPort": number} for port, number in ports.items()]
    mounts = [
        {"name": "braid", "mountPath": str(setting.mount)},
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    return {
        "spec": {
            "terminationGracePeriodSeconds": STOP_SECONDS,
            "containers": [
                {
                    "name": container,
                    "image": setting.image,
                    "resources": {"requests": dict(resources), "limits": dict(resources)},
                    **({"ports": listed} if listed else {}),
                    "volumeMounts": mounts,
                }
            ],
            "volumes": [
                {"name": "braid", "persistentVolumeClaim": {"claimName": setting.claim}},
                {"name": "config", "configMap": {"name": f"{name}-config"}},
                # Ray's object store, and NCCL between the GPUs of a node; 64 MB otherwise.
                {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            ],
        }
    }


def _quantity(value: float) -> str:
    """A number of CPUs: whole, or in thousandths."""
    return f"{value:.0f}" if value == int(value) else f"{value * 1000:.0f}m"


def _times(size: str, factor: int) -> str:
    """A size such as 32Gi, taken ``factor`` times."""
    match = re.fullmatch(r"([1-9]\d*)(Mi|Gi|Ti)", size)
    if match is None:
        raise ConfigError(f"--memory {size} must be a size such as 512Mi, 32Gi or 1Ti")
    return f"{int(match.group(1)) * factor}{match.group(2)}"
