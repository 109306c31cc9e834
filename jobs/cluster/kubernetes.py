"""``braid kubernetes``: writes a run as a manifest for KubeRay, from the template ``manifest.yaml`` beside
this file."""

import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template
from typing import Annotated, Any, Final, Literal

import typer

from braid.actors.config import ConfigError, parse_config, read_content
from braid.actors.config.paths import anchored
from braid.jobs.cluster.submission import STOP_SECONDS
from braid.jobs.output import check_outputs, print_or_write
from braid.jobs.usage import ConfigFile, Overrides

_NODE_SECONDS: Final = 1800.0  # seconds that a run waits for nodes that the autoscaler has yet to find


def kubernetes(
    config: ConfigFile,
    image: Annotated[str, typer.Option(help="Container image with Ray and Braid.")],
    claim: Annotated[str, typer.Option(help="Volume claim for runs and data, writable by many nodes.")],
    overrides: Overrides = None,
    kind: Annotated[
        Literal["RayJob", "RayCluster"], typer.Option(help="Cluster and run, or the cluster alone.")
    ] = "RayJob",
    ranks_per_node: Annotated[int, typer.Option(help="At most so many ranks on a worker pod.", min=1)] = 8,
    gpus: Annotated[bool, typer.Option("--gpus/--no-gpus", help="One GPU for every rank.")] = True,
    memory: Annotated[str, typer.Option(help="Memory of a rank.")] = "32Gi",
    max_nodes: Annotated[
        int | None, typer.Option(help="Most worker pods; default: what the run needs.", min=1)
    ] = None,
    mount: Annotated[
        Path, typer.Option(help="Where the claim is in the pods; relative paths begin there.")
    ] = (Path("/braid")),
    token_secret: Annotated[
        str | None,
        typer.Option(help="Secret with Ray's token (key auth_token); default: the operator's own."),
    ] = None,
    ray_version: Annotated[str | None, typer.Option(help="Ray in the image; default: the one here.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
) -> None:
    """Write a manifest for KubeRay: an autoscaling cluster, the run, its configuration."""
    check_outputs(output=output)
    # not `load_config`, which returns paths of this machine
    run = parse_config(read_content(config), overrides or (), source=str(config))
    all_ranks = run.layout().ranks
    ranks = min(ranks_per_node, all_ranks)
    least = -(-all_ranks // ranks)
    most = max_nodes or least
    name = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    if run.cluster.launcher != "ray":
        raise ConfigError(f"cluster.launcher={run.cluster.launcher!r} cannot run there; set it to ray")
    if len(name) > 47:  # limit of a RayJob: the names of cluster and pods are derived from it
        raise ConfigError(f"name={run.name!r} is too long for Kubernetes: at most 47 characters")
    if not mount.is_absolute():
        raise ConfigError(f"--mount {mount} must be an absolute path")
    if most < least:
        raise ConfigError(f"--max-nodes {most} must be {least} or more, for {all_ranks} ranks")
    if (size := re.fullmatch(r"([1-9]\d*)(Mi|Gi|Ti)", memory)) is None:
        raise ConfigError(f"--memory {memory} must be a size such as 512Mi, 32Gi or 1Ti")
    cluster = {
        "address": None,
        "device": "cuda" if gpus else "cpu",
        "placement_timeout_s": max(run.cluster.placement_timeout_s, _NODE_SECONDS),
    }
    run = anchored(run, mount).changed(cluster=cluster)
    cpus = max(1.0, run.cluster.cpus_per_rank * ranks)
    text = _filled(
        kind,
        name=name,
        config_name=f"{name}-config",
        config=run.to_yaml(),
        stop_seconds=STOP_SECONDS,
        ray_version=ray_version or _installed_ray(),
        token_secret=token_secret,
        image=image,
        claim=claim,
        mount=str(mount),
        max_nodes=most,
        cpus=f"{cpus:g}" if cpus == int(cpus) else f"{cpus * 1000:.0f}m",
        memory=f"{int(size[1]) * ranks}{size[2]}",
        gpus=str(ranks) if gpus else None,
    )
    print_or_write(output, text)


def _filled(kind: str, **values: object) -> str:
    """Fill the template; return YAML for ``kubectl apply -f -``: the ConfigMap, then the RayJob or
    RayCluster."""
    import yaml

    class Plain(yaml.SafeDumper):
        """Writes YAML for readers: without anchors and aliases, and with multi-line texts as blocks."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Plain, data: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)

    Plain.add_representer(str, text)
    template = Template(Path(__file__).with_name("manifest.yaml").read_text(encoding="utf-8"))
    filled = template.substitute({key: json.dumps(value) for key, value in values.items()})
    settings, job, cluster = _without_nulls(list(yaml.safe_load_all(filled)))
    job["spec"]["rayClusterSpec"] = cluster["spec"]
    return yaml.dump_all([settings, job if kind == "RayJob" else cluster], Dumper=Plain, sort_keys=False)


def _without_nulls(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_nulls(value) for key, value in content.items() if value is not None}
    return [_without_nulls(value) for value in content] if isinstance(content, list) else content


def _installed_ray() -> str:
    try:
        return version("ray")
    except PackageNotFoundError:
        raise ConfigError("Ray is not installed here: say with --ray-version what the image has") from None
