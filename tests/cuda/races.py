"""The model's verdict on everything, with progress: `make races`. Ends with one line of JSON.

{"mutants", "caught", "orders", "schedules", "clean"}

``--draw 10`` takes as many schedules, and of the faults that it must find, by a seed that it prints.
"""

import argparse
import json
import random
import sys
import time

from tests.cuda import mutants_of_exchanges, mutants_of_stages  # noqa: F401 (they register theirs)
from tests.cuda.mutants import MUTANTS
from tests.cuda.replay import Replay
from tests.cuda.steps import recorded
from tests.cuda.test_machine import ORDERED, cases
from tests.cuda.verdict import faults, faults_of_orders, left


def main() -> int:
    """Exit code 1 if a fault was missed, or something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, default=300, help="of each recorded step")
    parser.add_argument("--draw", type=int, help="schedules and faults: so many, drawn; without it all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args()
    orders, schedules, mutants = options.orders, cases(), MUTANTS
    if options.draw is not None:
        draw = random.Random(options.seed)
        _tell(
            f"{options.draw} of {len(schedules)} schedules and {len(mutants)} faults: --seed {options.seed}"
        )
        schedules, mutants = draw.sample(schedules, options.draw), draw.sample(mutants, options.draw)
    begin = time.perf_counter()
    wrong = []
    for case in schedules:
        found = faults(case)
        wrong += [f"{case.name}: {fault}" for fault in found]
        _tell(f"schedule {case.name}: {len(found) or 'no'} faults")
    for case in ORDERED:
        machine, _ = recorded(case)
        found = faults_of_orders(machine, orders)
        wrong += [f"{case.name}: {fault}" for fault in found]
        nodes = len(Replay(machine).nodes)
        _tell(f"{orders} orders of {nodes} nodes, {case.name}: {orders - len(found)} leave the same bits")
    expected = {case: left(case) for case in {mutant.case for mutant in mutants}}
    missed = []
    for mutant in mutants:
        with mutant.apply():
            found = faults(mutant.case, 30, expected[mutant.case])
        if not found:
            missed.append(mutant.name)
        _tell(f"fault: {mutant.name}: {found[0] if found else 'MISSED'}")
    for line in (*wrong, *(f"missed: {name}" for name in missed)):
        _tell(line)
    _tell(f"{time.perf_counter() - begin:.0f} s")
    result = {
        "mutants": len(mutants),
        "caught": len(mutants) - len(missed),
        "orders": orders * len(ORDERED),
        "schedules": len(schedules),
        "clean": not wrong,
    }
    print(json.dumps(result))
    return int(bool(wrong or missed))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
