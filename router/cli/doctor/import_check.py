"""Check that the import names `fabric`, `node` and `router` lead to macfabric.

Unrelated packages of all three names exist; one of them in the same environment silently
replaces ours.
"""

from importlib.util import find_spec
from pathlib import Path

from fabric import DISTRIBUTION
from router.cli.errors import CommandError

NAMES = ("fabric", "node", "router")
_ROOT = Path(__file__).resolve().parents[3]


def foreign_names() -> list[str]:
    """List our names that lead to other packages."""
    foreign = []
    for name in NAMES:
        spec = find_spec(name)
        origin = spec.origin if spec else None
        if origin is None or Path(origin).resolve().parents[1] != _ROOT:
            foreign.append(f"{name} ({origin or 'not found'})")
    return foreign


def require_own_names() -> None:
    """Raise CommandError if another package has taken one of our names."""
    foreign = foreign_names()
    if foreign:
        message = (
            f"Another package has taken a name of {DISTRIBUTION}: {', '.join(foreign)}. "
            f"{DISTRIBUTION} needs a virtual environment of its own."
        )
        raise CommandError(message)
