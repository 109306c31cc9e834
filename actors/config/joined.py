"""Reads the variables that torchrun sets for the processes that it starts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from braid.actors.config import Config
from braid.actors.config.model import ConfigError

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class JoinedProcess:
    """This process among those that torchrun has started."""

    rank: int
    ranks: int
    address: str
    port: int
    """Address of the store."""
    on_this_host: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "JoinedProcess | None":
        """Read torchrun's variables; return None unless all are set. Raise `ConfigError` for other values."""
        given = {name: environment.get(name, "") for name in _VARIABLES}
        if not all(given.values()):
            return None
        numbers = {**given, "LOCAL_WORLD_SIZE": environment.get("LOCAL_WORLD_SIZE", given["WORLD_SIZE"])}
        del numbers["MASTER_ADDR"]
        for name, text in numbers.items():
            if not text.isdecimal():
                raise ConfigError(f"{name}={text!r} must be a number, as torchrun sets it; {_unset(given)}")
        rank, ranks, port, here = map(int, numbers.values())
        if rank >= ranks:
            raise ConfigError(f"RANK={rank} must be less than WORLD_SIZE={ranks}; {_unset(given)}")
        return cls(rank, ranks, given["MASTER_ADDR"], port, max(1, here))


def _unset(given: Mapping[str, str]) -> str:
    return f"or unset {', '.join(given)} to start braid without torchrun"


def on_torchrun(config: Config) -> Config:
    """Return the configuration of a run whose processes torchrun has started. Raise `ConfigError` if it asks
    for Ray."""
    if config.cluster.launcher == "processes" or JoinedProcess.of(os.environ) is None:
        return config
    if "launcher" in config.cluster.model_fields_set:
        raise ConfigError(
            f"cluster.launcher={config.cluster.launcher!r} starts its own ranks, and torchrun has started "
            f"processes; leave cluster.launcher out, or start braid without torchrun"
        )
    return config.changed(cluster={"launcher": "processes"})
