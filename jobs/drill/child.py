"""The run of a drill as a process of its own: ``python -m braid.jobs.drill.child SPEC``.

What it does is what ``braid train`` does; the specification adds faults and the emulated hosts of its ranks.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from braid.actors.config import parse_config
from braid.actors.controller.controller import RunOptions
from braid.actors.controller.group import WorkerError
from braid.actors.controller.processes import Place
from braid.actors.stage.messages import Fault


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What the process is told."""

    config: dict[str, Any]
    faults: list[Fault]
    places: list[Place] | None
    resume: bool
    until: int | None = None
    """End after this step."""

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Spec":
        """From text."""
        content = json.loads(text)
        places = content["places"]
        return Spec(
            config=content["config"],
            faults=[Fault(**fault) for fault in content["faults"]],
            places=None if places is None else [Place(**place) for place in places],
            resume=content["resume"],
            until=content["until"],
        )


def run(spec: Spec) -> None:
    """Train to the end."""
    from braid.jobs.train import train

    config = parse_config(spec.config)
    options = RunOptions(resume=spec.resume, overwrite=not spec.resume, again=spec.resume, until=spec.until)
    train(config, options, faults=tuple(spec.faults), places=spec.places)


if __name__ == "__main__":
    spec = Spec.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        run(spec)
    except (ValueError, WorkerError) as error:
        print(f"{getattr(error, 'trace', '')}\nbraid: {error}".lstrip(), file=sys.stderr)
        sys.exit(2)
