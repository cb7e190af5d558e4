"""Run simulated lives and print what they violate; a seed always gives the same life."""

import argparse
import contextlib
import sys
import time

from node.runtime.one_loop import assert_one_loop
from tests.sim.planted import PLANTS
from tests.sim.planted_terms import TERM_PLANTS
from tests.sim.world import run, two_routers


def main():
    faults = [*(plant for plants in PLANTS.values() for plant in plants), *TERM_PLANTS]
    plants = {plant.__name__: plant for plant in faults}
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--count", type=int, default=1, help="how many seeds (default: 1)")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--digest", action="store_true", help="print a hash of each trace")
    parser.add_argument("--plant", choices=sorted(plants), help="put this fault into the code")
    parser.add_argument("--routers", type=int, choices=(1, 2), default=1, help="2: with a standby")
    options = parser.parse_args()
    make = two_routers if options.routers == 2 else None
    plant = plants.get(options.plant, contextlib.nullcontext)
    failed, judged_count = [], 0
    assert_one_loop()
    began_s = time.process_time()
    for seed in range(options.seed, options.seed + options.count):
        with plant():
            world = run(seed, make, is_verbose=options.trace)
        judged_count += world.reuse_judge.judged_count
        if options.trace:
            print(*(f"{at_s:10.4f}  {text}" for at_s, text in world.trace), sep="\n")
        if options.digest:
            print(seed, world.digest())
        if world.violation:
            failed.append(seed)
            print(f"seed {seed}: {world.violation}", flush=True)
    spent_s = time.process_time() - began_s
    print(
        f"{options.count - len(failed)} of {options.count} seeds hold, {judged_count} memories"
        f" judged, {spent_s:.1f} s of CPU"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
