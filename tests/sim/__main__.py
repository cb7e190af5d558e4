"""Live one seed's life and print it: python -m tests.sim --seed N --trace."""

import argparse
import sys
import time

from tests.sim.world import run


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--count", type=int, default=1, help="how many seeds (default: 1)")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--digest", action="store_true", help="print a hash of each trace")
    options = parser.parse_args()
    failed = []
    began_s = time.process_time()
    for seed in range(options.seed, options.seed + options.count):
        world = run(seed, is_verbose=options.trace)
        if options.trace:
            print(*(f"{at_s:10.4f}  {text}" for at_s, text in world.trace), sep="\n")
        if options.digest:
            print(seed, world.digest())
        if world.violation:
            failed.append(seed)
            print(f"seed {seed}: {world.violation}")
    spent_s = time.process_time() - began_s
    print(f"{options.count - len(failed)} of {options.count} seeds hold, {spent_s:.1f} s of CPU")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
