"""The nodes that a fabric had, as its router stores them: the next router expects those nodes."""

import asyncio
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from fabric.codec import from_plain, parse_json, to_plain
from fabric.errors import RejectedError
from fabric.ids import NodeName, parse_node_name
from router.limits import ROSTER_BYTES_MAX
from router.private_files import write_private

_LOG = logging.getLogger("macfabric.router.roster")
FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A node, and when it was last heard in seconds since the epoch."""

    name: NodeName
    seen_s: int
    is_drained: bool = False  # and empty: no agent can be waiting for it


@dataclass(frozen=True, slots=True)
class NodeRoster:
    """The nodes of a fabric, and how many the configuration of that time had (0: unknown)."""

    configured: int = 0
    nodes: tuple[SeenNode, ...] = ()
    lives: int = 0  # how often the router was started


class RosterStore(Protocol):
    """Stores the roster so that it survives the router."""

    def read(self) -> NodeRoster:
        """Return the stored roster; an empty one where there is none."""
        ...

    async def write(self, roster: NodeRoster) -> bool:
        """Replace the stored roster at once; return whether that succeeded."""
        ...


class RosterFile:
    """A roster in a file of the router's data folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> NodeRoster:
        """Return the stored roster; an empty one where the file is missing or unreadable."""
        try:
            with self._path.open("rb") as file:
                raw = file.read(ROSTER_BYTES_MAX + 1)
            return decode_roster(raw)
        except FileNotFoundError:
            return NodeRoster()
        except (OSError, RejectedError) as error:
            _LOG.warning("the stored roster %s is ignored: %s", self._path, error)
            return NodeRoster()

    async def write(self, roster: NodeRoster) -> bool:
        """Replace the file at once; log where the disk refuses."""
        try:
            await asyncio.to_thread(write_private, self._path, encode_roster(roster).decode())
        except OSError as error:
            _LOG.warning("the roster cannot be written: %s", error.strerror)
            return False
        return True


def encode_roster(roster: NodeRoster) -> bytes:
    """Return the bytes of a roster's file."""
    return json.dumps({"format": FORMAT, **to_plain(roster)}, indent=1).encode()


def decode_roster(raw: bytes) -> NodeRoster:
    """Read a roster's file; raise RejectedError where it is damaged or of an unknown format."""
    if len(raw) > ROSTER_BYTES_MAX:
        message = f"it has more than {ROSTER_BYTES_MAX} bytes"
        raise RejectedError(message)
    stored = parse_json(raw)
    if not isinstance(stored, dict) or stored.pop("format", None) != FORMAT:
        message = f"its format is not {FORMAT}"
        raise RejectedError(message)
    roster: NodeRoster = from_plain(NodeRoster, stored, "roster")
    for node in roster.nodes:
        parse_node_name(node.name)
    return roster
