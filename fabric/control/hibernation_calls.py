"""What the router asks of a node to write an agent into a file, or to take one in.

The file itself is the answer's body, or the request's; these messages go beside it.
"""

from dataclasses import dataclass, field
from typing import TypeVar

from fabric.codec import pack, unpack
from fabric.control.agent_at import AgentAt
from fabric.control.node_calls import AgentView
from fabric.errors import RejectedError
from fabric.limits import KIB

HIBERNATE_PATH = "/internal/hibernate"
RESUME_PATH = "/internal/resume"
CALL_HEADER = "x-macfabric-call"
MEDIA_TYPE = "application/octet-stream"
EPOCH_HEADER = "x-macfabric-epoch"
REVISION_HEADER = "x-macfabric-revision"
SIGNING_KEY_HEADER = "x-macfabric-signing-key"  # of clients, 64 hexadecimal digits
SALT_HEADER = "x-macfabric-signing-salt"
CALL_BYTES_MAX = 4 * KIB

Call = TypeVar("Call")


@dataclass(frozen=True, slots=True)
class Hibernate(AgentAt):
    """Write the agent's last finished turn into a file."""

    signing_key: bytes | None = field(default=None, repr=False)  # None: for this fabric only
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Resume(AgentAt):
    """Own the KV cache that the request's body holds, as `agent` at `epoch`."""

    replace: bool = False  # of an agent that has this name already
    signing_key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Resumed:
    """The agent as it is now, and what came with the file."""

    view: AgentView
    blocks_received: int
    blocks_reused: int  # were stored here already
    bytes_received: int


def encode_beside(call: Hibernate | Resume) -> str:
    """Spell a call as a header's value."""
    return pack(call).hex()


def decode_beside(kind: type[Call], text: str) -> Call:
    """Read a header's value; raise RejectedError for anything but a `kind`."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        message = "the call beside the file is not hexadecimal"
        raise RejectedError(message, code="invalid_message") from None
    return unpack(kind, raw, CALL_BYTES_MAX)
