"""Which faults can be made on this machine, for a configuration."""

import os
from collections.abc import Sequence

from braid.actors.config import Config, ConfigError
from braid.jobs.drill.plan import AIMED, KINDS, LEAST_TO_BE_SLOW, NEED_ROOT, NODE_CHANGES, SLOW, check_names


def possible_faults(config: Config) -> list[str]:
    """All that can be made; as many nodes join as leave."""
    ray = config.cluster.launcher == "ray"
    impossible = set(NEED_ROOT) if os.geteuid() or ray else set()
    elsewhere = config.cluster.address or os.environ.get("RAY_ADDRESS")
    if not ray or config.elastic.max_ranks is None or elsewhere:
        impossible |= NODE_CHANGES.keys()
    elif config.elastic.max_ranks < LEAST_TO_BE_SLOW:
        impossible.add(SLOW)
    if impossible.isdisjoint(NODE_CHANGES):
        impossible.add("skip")
    impossible |= {kind for kind in AIMED if _nothing_to_cut(config, kind)}
    possible = [kind for kind in KINDS if kind not in impossible]
    return [kind for kind in possible for _ in range(2 if kind == "node-joins" else 1)]


def check_faults(config: Config, kinds: Sequence[str]) -> None:
    """`ConfigError` for faults that are not known, or cannot be made here, or not together."""
    check_names(kinds)
    wanted = set(kinds)
    if wanted & NODE_CHANGES.keys() and wanted & NEED_ROOT:
        raise ConfigError(
            f"--faults: {', '.join(NODE_CHANGES)} need cluster.launcher=ray, and "
            f"{', '.join(sorted(NEED_ROOT))} need --launcher processes: drill them one after the other"
        )
    if wanted & NODE_CHANGES.keys() and "skip" in wanted:
        raise ConfigError("--faults skip: the step that is left out is another one where nodes change")
    if (odd := wanted & NEED_ROOT) and os.geteuid() != 0:
        names = ", ".join(sorted(odd))
        raise ConfigError(f"--faults {names}: network namespaces and mounts need root")
    if wanted & NEED_ROOT and config.cluster.launcher != "processes":
        raise ConfigError("faults of emulated hosts need --launcher processes")
    for kind in kinds:
        if kind in AIMED and (why := _nothing_to_cut(config, kind)):
            raise ConfigError(f"--faults {kind}: {why}")


def _nothing_to_cut(config: Config, kind: str) -> str:
    """Why no step has what a link is to be cut in; empty where it has."""
    layout = config.layout()
    if kind == "cut-gather" and not layout.zero:
        return "no parameters are gathered without sharding: --set parallel.zero=1"
    if kind == "cut-reduce" and layout.dp * layout.cp == 1:
        return "no gradients are summed over replicas: --set parallel.dp=2"
    return ""
