"""Messages for writing an agent to a file, and for resuming it from one.

The file is the body of the response or request; the message travels in a header.
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
    """Request to write an agent, as of its last finished turn, to a file."""

    signing_key: bytes | None = field(default=None, repr=False)  # None: for this fabric only
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Resume(AgentAt):
    """Request to own the KV cache in the request's body, as `agent` at `epoch`."""

    replace: bool = False  # an existing agent of this name
    signing_key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Resumed:
    """Resumed agent, and how many blocks and bytes were received."""

    view: AgentView
    blocks_received: int
    blocks_reused: int  # already stored on the node
    bytes_received: int


def encode_header(call: Hibernate | Resume) -> str:
    """Encode a call as a header value."""
    return pack(call).hex()


def decode_header(kind: type[Call], text: str) -> Call:
    """Decode a header value; raise RejectedError unless it is a `kind`."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        message = "the call header is not hexadecimal"
        raise RejectedError(message, code="invalid_message") from None
    return unpack(kind, raw, CALL_BYTES_MAX)
