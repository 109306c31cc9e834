"""``braid kubernetes``: the manifest that runs a configuration under KubeRay."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from braid.actors.config import ConfigError, parse_config, read_content
from braid.jobs.output import check_output
from braid.jobs.usage import ConfigFile, Overrides


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
    min_nodes: Annotated[int, typer.Option(help="Worker pods that are always there.", min=0)] = 0,
    max_nodes: Annotated[
        int | None, typer.Option(help="Most worker pods; default: what the run needs.", min=1)
    ] = None,
    mount: Annotated[
        Path, typer.Option(help="Where the claim is in the pods; relative paths begin there.")
    ] = (Path("/braid")),
    namespace: Annotated[str | None, typer.Option(help="Kubernetes namespace.")] = None,
    token_secret: Annotated[
        str | None,
        typer.Option(help="Secret with Ray's token (key auth_token); default: the operator's own."),
    ] = None,
    ray_version: Annotated[str | None, typer.Option(help="Ray in the image; default: the one here.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
) -> None:
    """Write a manifest for KubeRay: an autoscaling cluster, the run, its configuration."""
    check_output("--output", output)
    from braid.jobs.kubernetes.manifests import Setting, manifest, nodes_needed

    # not `load_config`, which gives paths of this machine
    resolved = parse_config(read_content(config), overrides or (), source=str(config))
    ranks_per_node = min(ranks_per_node, resolved.layout().ranks)
    needed = nodes_needed(resolved, ranks_per_node)
    setting = Setting(
        image=image,
        ray_version=ray_version or _ray_version(),
        ranks_per_node=ranks_per_node,
        gpus=gpus,
        memory_per_rank=memory,
        nodes=(min_nodes, max_nodes or max(min_nodes, needed)),
        claim=claim,
        mount=mount,
        namespace=namespace,
        token_secret=token_secret,
    )
    text = manifest(resolved, setting, kind)
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}") from None


def _ray_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ray")
    except PackageNotFoundError:
        raise ConfigError(
            "Ray is not installed here: say with --ray-version which one the image has"
        ) from None
