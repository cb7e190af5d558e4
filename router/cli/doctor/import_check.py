"""Do the import names `fabric`, `node` and `router` lead to macfabric?

Unrelated packages of all three names exist; one of them in the same environment replaces ours
without a word.
"""

from importlib.util import find_spec
from pathlib import Path

from fabric import DISTRIBUTION
from router.cli.errors import CommandError

NAMES = ("fabric", "node", "router")
_ROOT = Path(__file__).resolve().parents[3]


def foreign_names() -> list[str]:
    """List those of our names that lead somewhere else."""
    foreign = []
    for name in NAMES:
        spec = find_spec(name)
        origin = spec.origin if spec else None
        if origin is None or Path(origin).resolve().parents[1] != _ROOT:
            foreign.append(f"{name} ({origin or 'not found'})")
    return foreign


def require_own_names() -> None:
    """Refuse to run beside a package that took one of our names."""
    foreign = foreign_names()
    if foreign:
        message = (
            f"Another package has taken a name of {DISTRIBUTION}: {', '.join(foreign)}. "
            f"{DISTRIBUTION} needs a virtual environment of its own."
        )
        raise CommandError(message)
