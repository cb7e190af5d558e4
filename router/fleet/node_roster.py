"""Stored roster: the nodes that a fabric had, which its next router expects."""

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
    """Node, and when it last answered, in seconds since the epoch."""

    name: NodeName
    seen_s: int
    is_drained: bool = False  # and empty: it owns no agent


@dataclass(frozen=True, slots=True)
class NodeRoster:
    """Nodes of a fabric, and how many were configured (0: unknown)."""

    configured: int = 0
    nodes: tuple[SeenNode, ...] = ()
    lives: int = 0  # number of the router's starts


class RosterStore(Protocol):
    """Storage of the roster that survives the router."""

    def read(self) -> NodeRoster:
        """Return the stored roster, or an empty one."""
        ...

    async def write(self, roster: NodeRoster) -> bool:
        """Replace the stored roster atomically; return whether it was stored."""
        ...


class RosterFile:
    """Roster in a file of the router's data folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> NodeRoster:
        """Return the stored roster, or an empty one if the file is missing or unreadable."""
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
        """Replace the file atomically; log if the disk refuses."""
        try:
            await asyncio.to_thread(write_private, self._path, encode_roster(roster).decode())
        except OSError as error:
            _LOG.warning("cannot write the roster: %s", error.strerror)
            return False
        return True


def encode_roster(roster: NodeRoster) -> bytes:
    """Return the bytes of a roster's file."""
    return json.dumps({"format": FORMAT, **to_plain(roster)}, indent=1).encode()


def decode_roster(raw: bytes) -> NodeRoster:
    """Decode a roster's file; raise RejectedError if it is damaged or of an unknown format."""
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
