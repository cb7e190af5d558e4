"""The leases of command-line runs on the router's disk, so that a restart ends none of them."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fabric.codec import from_plain, to_plain
from fabric.errors import RejectedError
from router.limits import SCENARIO_LEASES_MAX
from router.private_files import write_private
from router.runs.agent_leases import HeldLease

_LOG = logging.getLogger("macfabric.router.runs")
NAME: Final = "leases.json"
FORMAT: Final = 1


def write_leases(folder: Path, leases: Sequence[HeldLease]) -> None:
    """Replace the stored leases; a disk that refuses is only logged: leases are renewed."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        rows = [to_plain(lease) for lease in leases]
        write_private(folder / NAME, json.dumps({"format": FORMAT, "leases": rows}))
    except OSError as error:
        _LOG.warning("leases of scenario runs cannot be written: %s", error.strerror)


def read_leases(folder: Path) -> list[HeldLease]:
    """Return the stored leases; none where the file is missing or of no known format."""
    try:
        stored = json.loads((folder / NAME).read_text())
        if stored["format"] != FORMAT:
            return []
        rows = stored["leases"][:SCENARIO_LEASES_MAX]
        return [from_plain(HeldLease, row, NAME) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, RejectedError):
        return []
