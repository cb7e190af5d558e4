"""The router's request to a node for one turn, the events that the node streams back; its times.

Travels as JSON: one request body in, one event per line out. The node has the tokenizer and the
template, the router the API shapes; neither depends on the other's part.
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final

from fabric.codec import dump_json, from_newer, left_out, on_wire, parse_json
from fabric.edit_mode import EditMode
from fabric.errors import TooLargeError
from fabric.ids import AgentId, MigrationId, NodeName, OperationId, TenantId, Traceparent, TurnId
from fabric.limits import ADDRESSES_MAX, COMPLETION_TOKENS_MAX
from fabric.net.links import Address
from fabric.turn.answer_constraints import ANY_CALLS, CallChoice, OutputFormat
from fabric.turn.messages import Message

GENERATE_PATH = "/internal/generate"
COUNT_PATH = "/internal/count"  # takes the same request, and answers with its prompt's tokens
APPEND_PATH = "/internal/append"  # takes it too, and answers with the extended prompt
CLUSTER_HEADER = "x-macfabric-cluster"


@dataclass(frozen=True, slots=True)
class TurnTag:
    """Name of a turn, and its time at the router before it was sent to its node."""

    id: TurnId
    began_s: float  # wall clock, when the router received the request
    queue_s: float = 0.0  # waited at the router
    move_s: float = 0.0  # its agent was moved to the node first
    # Its span at the router; only for nodes that read it.
    trace: Traceparent | None = field(default=None, metadata=left_out())


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """Seconds of a turn by part. No moment counts twice, so their sum is the turn's duration."""

    queue_s: float = 0.0  # waited for a place, for its agent or for memory
    move_s: float = 0.0  # its agent was moved to the node first
    prepare_s: float = 0.0  # rendered, encoded and matched its prompt
    fetch_s: float = 0.0  # waited for tokens of another node
    load_s: float = 0.0  # read tokens from the disk
    prefill_s: float = 0.0  # computed the rest of the prompt, and the first token
    decode_s: float = 0.0  # computed the other tokens
    save_s: float = 0.0  # saved what was not saved meanwhile
    first_token_s: float | None = None  # from the request to the first token; None: there was none

    @property
    def total_s(self) -> float:
        """Duration of the turn."""
        parts = (self.queue_s, self.move_s, self.prepare_s, self.fetch_s)
        return sum(parts) + self.load_s + self.prefill_s + self.decode_s + self.save_s

    def plus(self, later: "TurnTimes") -> "TurnTimes":
        """Add the times of the turn's next part, on another node."""
        parts = (
            (part.name, getattr(self, part.name), getattr(later, part.name)) for part in _TIMES
        )
        first_s = self.first_token_s
        if first_s is None and later.first_token_s is not None:
            first_s = self.total_s + later.first_token_s
        return TurnTimes(
            **{name: own_s + next_s for name, own_s, next_s in parts}, first_token_s=first_s
        )

    def __str__(self) -> str:
        """List the parts that took time."""
        parts = ((part.name.removesuffix("_s"), getattr(self, part.name)) for part in _TIMES)
        return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts if seconds)


_TIMES: Final = fields(TurnTimes)[:-1]


class IdentityKind(StrEnum):
    """Way in which the caller named the conversation."""

    AGENT = "agent"  # X-Agent-ID: this agent's context becomes what the caller sends
    GROUP = "group"  # prompt_cache_key, user: several conversations may share it
    CONTENT = "content"  # nothing: recognized by its content


class CacheTier(StrEnum):
    """Tier that the reused tokens were in."""

    COLD = "cold"
    HOT = "hot"
    DISK = "disk"
    PEER = "peer"


class MatchKind(StrEnum):
    """Relation of the prompt to the stored context."""

    NONE = "none"
    EXACT = "exact"
    EXTEND = "extend"
    DIVERGE = "diverge"
    EDIT = "edit"  # tokens after an edit were kept
    SPANS = "spans"  # runs of other contexts were reused


class Priority(StrEnum):
    """Priority of a turn."""

    INTERACTIVE = "interactive"  # a user waits for the answer
    BACKGROUND = "background"  # may be paused, and resumes where it was


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of the conversation: an agent, a group of conversations, or its content alone."""

    kind: IdentityKind
    agent: AgentId | None = None  # set for AGENT and, as the name to prefer, for GROUP


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """Limit of an answer's thoughts, as the client gave it: tokens, or an effort."""

    tokens: int | None = None  # of all its thoughts together; None: by the effort
    effort: str | None = None  # none, minimal, low, …: the node knows how many tokens that is


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; temperature 0 is greedy."""

    max_tokens: int = COMPLETION_TOKENS_MAX  # or what the context holds
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # None: none; n: the chosen token and the n most likely
    logit_bias: dict[str, float] = field(default_factory=dict)  # token id as text
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False  # benchmarks only
    output: OutputFormat | None = None  # None: any text
    # None: by the node's settings; nodes of older versions read requests without it.
    thoughts: ThoughtLimit | None = field(default=None, metadata=left_out())


@dataclass(frozen=True, slots=True)
class Resumption:
    """An answer that stopped between two tokens, and that another node continues seamlessly."""

    answer_ids: tuple[int, ...]  # sampled and delivered; the agent's record ends with them
    # The next token: not in the cache yet.
    sampled: int = field(metadata=on_wire("drawn"))
    top: tuple[tuple[int, float], ...]  # its log probability and the alternatives', if requested
    seed: int
    # The client has seen the sampled one, too.
    is_delivered: bool = field(default=False, metadata=on_wire("told"))


@dataclass(frozen=True, slots=True)
class HeadLoan:
    """Another node that has or computes a beginning of the prompt, which the turn's node may fetch.

    A hint: the lender decides what it may lend, and the turn computes the rest.
    """

    source: NodeName
    addresses: tuple[Address, ...]  # of its data plane
    is_coming: bool = False  # a turn that was just sent there is going to compute it

    def __post_init__(self) -> None:
        """Raise TooLargeError for more addresses than a node has."""
        if len(self.addresses) > ADDRESSES_MAX:
            message = f"a node has at most {ADDRESSES_MAX} addresses"
            raise TooLargeError(message)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn: `messages` for chat, `prompt` or `prompt_ids` for raw completion.

    Exactly one is set. A turn that is not kept has no agent and stores nothing: one more answer to
    a prompt that another turn keeps, or a prompt that is only counted.
    """

    operation: OperationId
    tenant: TenantId
    identity: Identity
    sampling: Sampling
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    tools: list[Any] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    sketch: tuple[int, ...] = ()
    epoch: int = 0  # the directory's epoch of the agent; 0: unknown or new
    priority: Priority = Priority.INTERACTIVE
    resume: Resumption | None = None
    after: MigrationId | None = None  # the move that makes the node the agent's owner, if not yet
    weight: float = 1.0  # of its tenant, against others that wait for the same node
    erased_epoch: int = 0  # up to which the agent was erased, in case the node lacks the tombstone
    reads_calls: bool = True  # False: the prompt has the tools, and the answer is text
    calls: CallChoice = ANY_CALLS
    retain_s: float = 0.0  # after its answer, within which the client announced to return
    was_admitted: bool = False  # by a node that handed it over: no queue is too full for it
    extends: bool = False  # `prompt` begins with the agent's whole stored text
    prompt_ids: tuple[int, ...] | None = None  # a raw prompt in the model's own tokens
    echo: bool = False  # send the prompt before the answer, with log probabilities if requested
    is_kept: bool = True
    continues: bool = False  # the last message is the beginning of the answer
    beside: AgentId | None = None  # whose conversation a turn that is not kept shares
    # What to do if the prompt differs in the middle; None: by the agent's directives.
    edits: EditMode | None = None
    is_private: bool = False  # whether its agent is, unless the node has newer settings
    # Of a prompt that `extends`: the bytes at which control marks begin that are plain text.
    plain_marks: tuple[int, ...] | None = field(default=None, metadata=left_out())
    term: int | None = field(default=None, metadata=left_out())  # of the router that places it
    # Only for nodes whose view has the same `protocol` as the lender's.
    head: HeadLoan | None = field(default=None, metadata=left_out())
    # Only for nodes whose view has a `build`; these answer with the turn's times.
    turn: TurnTag | None = field(default=None, metadata=left_out())

    @property
    def is_scored(self) -> bool:
        """Whether the prompt's logprobs are requested, so that nothing of it is reused."""
        return self.echo and self.sampling.logprobs is not None


@dataclass(frozen=True, slots=True)
class Admitted:
    """First event: the turn's agent, and how much of the prompt was reused."""

    agent: AgentId
    node: NodeName
    epoch: int
    cache: CacheTier
    match: MatchKind
    prompt_tokens: int
    cached_tokens: int
    match_reason: str  # where and why the match ended, in words without prompt text
    template: tuple[str, ...] = ()  # changes of the messages for the model's template
    system: str = ""  # short fingerprint of the model and all that changes its bits
    amortized_tokens: int = 0  # cached tokens after an edit, computed before it
    # Cached tokens that another node sent while the turn waited; None: none.
    fetched_tokens: int | None = field(default=None, metadata=left_out())
    event: str = "admitted"


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Progress of prefill: how many of the prompt's tokens are in the cache."""

    tokens: int
    event: str = "prefilling"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token and of the alternatives to it; a prompt's first has none."""

    token: str
    logprob: float | None
    alternatives: tuple[tuple[str, float], ...] = field(default=(), metadata=on_wire("rivals"))


@dataclass(frozen=True, slots=True)
class Delta:
    """Text produced by generated tokens up to and including number `index` (from 0).

    Number -1 is the prompt, sent back.
    """

    index: int
    text: str
    reasoning: bool = False
    logprobs: tuple[TokenLogprob, ...] = ()
    event: str = "delta"

    @property
    def is_echo(self) -> bool:
        """Whether the logprobs are the prompt's, for a request with `echo`."""
        return self.index < 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call by the model; `arguments` is JSON text.

    A broken call was cut, or is malformed: its arguments end where they could not be read further.
    """

    name: str
    arguments: str
    id: str = ""  # the model's own, or derived from the operation's: the same on every node
    is_broken: bool | None = field(default=None, metadata=left_out())


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Calls parsed from the output."""

    calls: tuple[ToolCall, ...]
    event: str = "tool_calls"


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A part of a call that is being written: first its name, then its arguments in parts.

    All of it follows in `ToolCalls` by the same id.
    """

    index: int  # as a delta's
    id: str
    name: str = ""
    arguments: str = ""
    event: str = "tool_call_part"


class FinishReason(StrEnum):
    """Why a stream ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a successful turn, sent once its KV cache is durable."""

    reason: FinishReason
    completion_tokens: int
    stop_string: str | None = None
    durable: bool = True  # False: the disk refused; the agent lives in memory only
    broken_calls: int = 0  # cut or malformed; in the text if they have no name
    times: TurnTimes | None = field(default=None, metadata=left_out())  # if the request has a tag
    event: str = "finished"


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Last event of a turn whose agent moves away; the agent's new node continues the turn.

    Without `resume` no token was sampled yet, and the router sends the same request again.
    """

    resume: Resumption | None
    times: TurnTimes | None = field(default=None, metadata=left_out())  # of its part, likewise
    event: str = "handed_over"


@dataclass(frozen=True, slots=True)
class Failed:
    """Last event of a turn that failed after its first event."""

    status: int
    code: str
    message: str
    event: str = "failed"


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Number of tokens of a prompt."""

    tokens: int


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """An agent's stored text with appended text; None if the agent has no text."""

    text: str | None
    # The bytes at which control marks begin that are plain text.
    plain_marks: tuple[int, ...] | None = field(default=None, metadata=left_out())


Event = Admitted | Prefilling | Delta | ToolCallPart | ToolCalls | Finished | HandedOver | Failed

_EVENTS: dict[str, type[Event]] = {
    "admitted": Admitted,
    "prefilling": Prefilling,
    "delta": Delta,
    "tool_call_part": ToolCallPart,
    "tool_calls": ToolCalls,
    "finished": Finished,
    "handed_over": HandedOver,
    "failed": Failed,
}


def encode_event(event: Event) -> bytes:
    """Encode one event as a line of JSON."""
    return dump_json(event) + b"\n"


def decode_event(line: bytes) -> Event:
    """Decode one line, also of a newer node; raise RejectedError if it is no known event."""
    plain = parse_json(line)
    name = plain.get("event") if isinstance(plain, dict) else None
    event: Event = from_newer(_EVENTS.get(str(name), Failed), plain, "event")
    return event
