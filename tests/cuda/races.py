"""The model's verdict on everything, with progress: `make races`. Ends with one line of JSON.

{"mutants", "caught", "orders", "schedules", "clean"}

``--draw 10`` takes as many schedules, and of the faults that it must find, by a seed that it prints.
"""

import argparse
import json
import random
import sys
import time

from tests.cuda.mutants import MUTANTS, faults_of_mutant
from tests.cuda.steps import faults
from tests.cuda.test_machine import CASES


def main() -> int:
    """Exit code 1 if a fault was missed, or something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, default=300, help="of each recorded step")
    parser.add_argument("--draw", type=int, help="schedules and faults: so many, drawn; without it all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args()
    cases, mutants, draw = CASES, MUTANTS, random.Random(options.seed)
    if options.draw is not None:
        cases, mutants = (draw.sample(some, min(options.draw, len(some))) for some in (cases, mutants))
        _tell(f"{len(cases)} of {len(CASES)} schedules, {len(mutants)} of {len(MUTANTS)} faults")
    _tell(f"--seed {options.seed}")
    begin = time.perf_counter()
    wrong, missed = [], []
    for case in cases:
        found = faults(case, range(options.orders))
        wrong += [f"{case.name}: {fault}" for fault in found]
        _tell(f"{case.name}, {options.orders} orders: {len(found) or 'no'} faults")
    for mutant in mutants:
        found = faults_of_mutant(mutant)
        missed += [] if found else [mutant.name]
        _tell(f"fault: {mutant.name}: {found[0] if found else 'MISSED'}")
    for line in (*wrong, *(f"missed: {name}" for name in missed)):
        _tell(line)
    _tell(f"{time.perf_counter() - begin:.0f} s")
    result = {
        "mutants": len(mutants),
        "caught": len(mutants) - len(missed),
        "orders": options.orders * len(cases),
        "schedules": len(cases),
        "clean": not wrong,
    }
    print(json.dumps(result))
    return int(bool(wrong or missed))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
