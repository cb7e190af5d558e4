"""A fake node's state and its test hooks, apart from any transport."""

import json
from dataclasses import dataclass, field

from fabric.control.node_calls import LastMatch, SealAgent
from fabric.errors import FabricError
from fabric.record.manifest import OwnerState
from fabric.turn.generation import MatchKind

BLOCK_CHARS = 64


@dataclass
class Memory:
    """A fake node's state of one agent."""

    tenant: str
    agent: str
    epoch: int
    state: OwnerState = OwnerState.OWNED
    owner: str | None = None  # the owner's node, if this is a replica
    text: str = ""
    group: str | None = None
    revision: int = 0
    sketch: tuple = ()
    migration: str | None = None
    sealed_to: str | None = None
    busy: int = 0
    hot: bool = True
    pinned: bool = False
    kept: bool = False
    last_match: LastMatch | None = None
    turns: str = ""  # the turn history, as in a real record
    seal: SealAgent | None = None  # the move that takes over a running turn

    @property
    def key(self):
        return self.tenant, self.agent

    def record(self):
        names = ("tenant", "agent", "text", "group", "sketch", "turns")
        return json.dumps({name: getattr(self, name) for name in names}).encode()


@dataclass
class Behaviour:
    """Settings by which a test changes a fake node."""

    delay_s: float = 0.0  # between words
    first_delay_s: float = 0.0  # before the admission
    refuse: FabricError | None = None  # instead of a stream
    raw_answer: tuple[int, bytes] | None = None  # HTTP status and body
    events: list | None = None  # after the admission, in place of the echo
    amortized_tokens: int = 0  # reported as kept behind an edit
    break_after: int | None = None  # cut the connection after so many events
    hands_over: bool = False  # sealing an agent ends its running turn
    hang: bool = False  # answer nothing at all
    lost_replies: set = field(default_factory=set)  # control calls that run, but get no reply
    dropped_calls: set = field(default_factory=set)  # control calls that are dropped
    fail: dict = field(default_factory=dict)  # control call: FabricError
    slow: dict = field(default_factory=dict)  # control call: seconds


def block_names(text):
    """Return the names of a text's blocks; texts with a common prefix share them."""
    return {f"{i}:{text[i : i + BLOCK_CHARS]}" for i in range(0, len(text), BLOCK_CHARS)}


def prompt_text(request):
    if request.prompt is not None:
        return request.prompt
    if request.prompt_ids is not None:
        return " ".join(map(str, request.prompt_ids))
    return "".join(f"<{m.role}>{''.join(m.texts)}" for m in request.messages)


def match(stored, text):
    if not stored:
        return MatchKind.NONE, 0
    if text == stored:
        return MatchKind.EXACT, len(text) - 1
    if text.startswith(stored):
        return MatchKind.EXTEND, len(stored)
    common = next(
        (i for i, (a, b) in enumerate(zip(stored, text, strict=False)) if a != b), len(text)
    )
    return (MatchKind.DIVERGE, common) if common else (MatchKind.NONE, 0)
