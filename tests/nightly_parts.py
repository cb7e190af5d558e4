"""The nightly tests, split into parts that each fit an hour on two cores.

`make nightly` lists them, `make nightly PART=lives-1` runs one. The longest matching prefix decides
which part a file belongs to. Files of a part with several shares are dealt out test by test.
"""

from collections.abc import Iterable
from typing import Final

# Path prefix below tests/ -> name of the part. `REST` takes what no prefix matches.
PREFIXES: Final = {
    "sim/test_simulation.py": "lives",
    "sim/test_two_routers.py": "routers",
    "sim/": "faults",
    "faults/": "faults",
    "fuzz/": "fuzz",
    "node/mlx/": "models",
    "node/test_architectures_served.py": "models",
    "models/": "models",
    "node/turn/test_forged_turns.py": "templates",
    "node/turn/test_original_templates.py": "templates",
    "node/turn/test_reuse.py": "templates",
    "clients/": "clients",
    "cluster/": "cluster",
    "e2e/test_dashboard_session.py": "cluster",
    "chaos/": "chaos",
    "fleet/": "fleet",
}
REST: Final = "rest"
SHARES: Final = {"lives": 5, "routers": 5}


def parts() -> list[str]:
    """Return the name of every part, in the order in which `make nightly` lists them."""
    names = dict.fromkeys([*PREFIXES.values(), REST])
    return [share for name in names for share in _shares(name)]


def select(paths: Iterable[str], part: str) -> list[bool]:
    """Return for each test, given by its file's path below tests/, whether `part` has it."""
    seen: dict[str, int] = {}
    chosen = []
    for path in paths:
        name = _part_of(path)
        index = seen[name] = seen.get(name, -1) + 1
        shares = _shares(name)
        chosen.append(shares[index % len(shares)] == part)
    return chosen


def _part_of(path: str) -> str:
    matching = [prefix for prefix in PREFIXES if path.startswith(prefix)]
    return PREFIXES[max(matching, key=len)] if matching else REST


def _shares(name: str) -> list[str]:
    count = SHARES.get(name, 1)
    return [name] if count == 1 else [f"{name}-{number}" for number in range(1, count + 1)]


if __name__ == "__main__":
    print("\n".join(parts()))
