"""DHelix figure 15 on real links: what each part of its overlap adds, one after the other, measured.

Two emulated hosts of two ranks each: tensor parallelism inside them, context parallelism or experts across;
the links inside hosts are shaped, too, as the CPUs would be what copies in memory wait for.
The parts are those of the simulated figure (`tests.papers.dhelix_parts`): the pairing of a layer's passes, by
costs that were measured here, may bring together compute and collectives of the host, then compute and
collectives between hosts, then both links, and may at last move weight gradients. All alternate in one run
with `megatron`, which overlaps nothing, and `braid`, as it is planned and as it would be without the gain of
both links at once.

    PYTHONPATH=$PWD python -m tests.measure.parts --layout cp2tp2 --tokens 512 > PARTS.json
"""

import argparse
import json
import sys
from dataclasses import replace

from braid.actors.config import Config
from braid.actors.controller.planning import model_graphs, setting_of
from braid.jobs.bench.overlap import Decide, planned, run
from braid.jobs.bench.overlap_case import OverlapCase
from braid.scheduling.cost.profile import Profile
from braid.scheduling.generate.lower import Choices
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.plan.decide import Outcome, anything, measured, outcome_of
from braid.scheduling.plan.orders import layer_pair, segment_steps
from braid.scheduling.plan.pairing import pair
from braid.scheduling.schedule.text import parse_sides
from tests.papers.dhelix_parts import PARTS, Part, restricted


def with_part(part: Part) -> Decide:
    """`dhelix` with only what the part allows."""

    def decide(config: Config, shape: ModelShape, profile: Profile) -> Outcome:
        graphs, setting = model_graphs(config, shape, profile.streams), setting_of(config, shape)
        bench = measured(graphs, profile)(setting)
        problem = restricted(layer_pair(bench), bench.members["layer"].backward, part)
        choices = Choices(orders={parse_sides("F:layer|B:layer"): segment_steps(problem, pair(problem))})
        return outcome_of(bench, choices, None, anything)

    return decide


def links_apart(config: Config, shape: ModelShape, profile: Profile) -> Outcome:
    """`braid` as it would be planned if links inside hosts and between them stood still beside each other."""
    links = {stream.value for stream in (Stream.INTRA, Stream.INTER)}

    def link(name: str) -> bool:
        return profile.classes.get(name, name) in links

    never = {name: 10.0 for name in profile.slowdowns if all(map(link, name.split("<")))}
    never |= {f"{one}<{other}": 10.0 for one in links for other in links - {one}}
    return planned(config, shape, replace(profile, slowdowns={**profile.slowdowns, **never}))


def main() -> None:
    """Measure the parts; JSON as of `braid bench overlap`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layout", default="cp2tp2", choices=("cp2tp2", "ep2tp2"))
    for name, value in {"hidden": 256, "layers": 2, "tokens": 512, "micro-batches": 16, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--mbit", type=float, default=400, help="rate of the link between hosts")
    parser.add_argument("--inside-mbit", type=float, default=1600, help="rate of the links inside them")
    parser.add_argument("--context", default="all_gather", choices=("all_gather", "ring"))
    asked = vars(parser.parse_args())
    rounds = asked.pop("rounds")
    result = run(
        OverlapCase(**asked, route_evenly="ep" in asked["layout"]),
        schedules=("megatron", "braid"),
        peers=False,
        rounds=rounds,
        others={
            **{f"dhelix, {part.name}": with_part(part) for part in PARTS},
            "braid, links apart": links_apart,
        },
        progress=lambda text: print(text, file=sys.stderr),
    )
    print(json.dumps(result.as_json(), indent=2))


if __name__ == "__main__":
    main()
