"""An agent's durable record: its text, its tokens, and a piece table over immutable blocks.

Published after its blocks, the record is the commit point of a turn. A prompt is matched on
`text` first; `token_ends` then maps the matched bytes to tokens.

    tokens   0 ......... 256 ......... 512 .... n
    pieces   [ block 0    )[ block 1    )[ tail  )     each: block, token range in it, shift
    edited         |                                   lineage of the pieces up to an edit
    windows                [ block 1    )[ tail  )     sliding-window layers, where stored;
                                                       after an edit, keyed by a piece's end
    states                       |              |      recurrent states, each at its token
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, pairwise

from fabric.codec import left_out, on_wire, pack, pack_fields
from fabric.errors import CorruptDataError
from fabric.ids import (
    BLOCK_HASH_BYTES,
    CHECKSUM_BYTES,
    AgentId,
    AgentKey,
    Fingerprint,
    MigrationId,
    NodeName,
    TenantId,
)
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import (
    AGENT_TOKENS_MAX,
    BLOCK_BYTES_MAX,
    BLOCK_TOKENS,
    BRANCHES_MAX,
    CALL_IDS_KNOWN_MAX,
    DECAY_S_MAX,
    DIRECTIVES_MAX,
    MANIFEST_BYTES_MAX,
    PACKED_PIECES_MAX,
    PIECES_MAX,
    SKETCH_PIECES_MAX,
    TOKEN_TEXT_BYTES_MAX,
    UNDONE_SHOWN_MAX,
)
from fabric.record.bounds import is_count, is_hash, is_wall_time, text_bytes_max
from fabric.record.directive import Directive
from fabric.record.edited_head import EditedHead
from fabric.record.envelope import Envelope
from fabric.record.lenders import is_sound_series
from fabric.record.message_parts import OtherParts
from fabric.record.message_positions import MessagePositions
from fabric.record.piece_table import Piece, PieceTable
from fabric.record.provenance import Provenance
from fabric.turn.conversation_form import ConversationForm
from fabric.u32s import U32s


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of one agent. All but `is_private` end with the agent's next turn."""

    rebuilds: bool = False  # its next turn recomputes what was kept after edits
    is_closed: bool = False  # it is finished: evict it first when others need room
    decays_after_s: float | None = None  # once idle for so long, evict it before others
    is_private: bool = False  # no other agent of its tenant may reuse its cache

    def problem(self) -> str | None:
        """Return why the settings are invalid; None if they are valid."""
        after_s = self.decays_after_s
        if after_s is not None and not 0 <= after_s <= DECAY_S_MAX:
            return "its decay time is out of range"
        return None

    def after_turn(self) -> "AgentSettings | None":
        """Return the settings that a turn leaves."""
        return unless_default(AgentSettings(is_private=self.is_private))

    def of_fork(self) -> "AgentSettings | None":
        """Return the settings of a new agent with the same cache, reset to default retention."""
        return unless_default(replace(self, is_closed=False, decays_after_s=None))

    def is_spent(self, idle_s: float) -> bool:
        """Return whether an agent that has been idle for so long is evicted before others."""
        return self.is_closed or (self.decays_after_s is not None and idle_s >= self.decays_after_s)


def is_spent(settings: AgentSettings | None, idle_s: float) -> bool:
    """Return whether an agent with these settings, if any, is evicted before others."""
    return settings is not None and settings.is_spent(idle_s)


def unless_default(settings: AgentSettings) -> AgentSettings | None:
    """Return the settings, or None if all are the defaults."""
    return None if settings == AgentSettings() else settings


MAGIC = b"MFMANI01"


class OwnerState(StrEnum):
    """Ownership of an agent on this node."""

    OWNED = "owned"  # serves its turns
    SEALED = "sealed"  # a migration holds the final record; serves nothing until it is decided
    REPLICA = "replica"  # another node owns a later epoch; kept until evicted


@dataclass(frozen=True, slots=True)
class Placed:
    """A block whose last token is the one before `end`; or a piece of it, of an edited cache."""

    block: BlockRef
    end: int

    @property
    def start(self) -> int:
        """Position of the block's first token, in a cache that is not edited."""
        return self.end - self.block.tokens_count


@dataclass(frozen=True, slots=True)
class Branch:
    """Superseded form of an agent's conversation: its blocks that the record itself lacks."""

    refs: tuple[BlockRef, ...]
    tokens_count: int  # of the whole form


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything needed to continue an agent anywhere that holds its blocks."""

    tenant: TenantId
    agent: AgentId
    fingerprint: Fingerprint
    owner: NodeName
    epoch: int
    revision: int
    state: OwnerState
    text: str
    token_ids: U32s
    token_ends: U32s  # byte offset in utf-8 `text` where each token's text ends
    prompt_tokens_count: int  # tokens of the last rendered prompt; the rest was generated
    pieces: PieceTable
    windows: tuple[Placed, ...] = ()
    states: tuple[Placed, ...] = ()
    group: str | None = None  # weak identity (prompt_cache_key, user) shared by conversations
    sketch: tuple[int, ...] = ()
    created_s: float = 0.0
    used_s: float = 0.0
    migration: MigrationId | None = None
    sealed_to: NodeName | None = None
    pinned: bool = False
    provenance: Provenance = field(default=Provenance(), metadata=on_wire("extras"))
    edited: EditedHead | None = field(default=None, metadata=left_out())
    directives: tuple[Directive, ...] | None = field(default=None, metadata=left_out())
    positions: MessagePositions | None = field(
        default=None, metadata={**left_out(), **on_wire("said")}
    )
    settings: AgentSettings | None = field(
        default=None, metadata={**left_out(), **on_wire("wishes")}
    )
    # Series of the rows that it lends; replaced once rows lent before must be removed.
    series: str | None = field(default=None, metadata=left_out())
    # What the messages of `positions` have besides text; None: not known.
    parts: tuple[OtherParts, ...] | None = field(default=None, metadata=left_out())
    # By which a prompt continues the agent although its client has rewritten passing texts.
    form: ConversationForm | None = field(default=None, metadata=left_out())
    # Superseded forms, the oldest first.
    branches: tuple[Branch, ...] | None = field(default=None, metadata=left_out())

    def __post_init__(self) -> None:
        """Pack the long lists; raise CorruptDataError if a number is out of range."""
        for name in ("token_ids", "token_ends"):
            if type(getattr(self, name)) is not U32s:
                object.__setattr__(self, name, U32s(getattr(self, name)))

    @property
    def key(self) -> AgentKey:
        """The agent that it is the record of."""
        return self.tenant, self.agent

    @property
    def tokens_count(self) -> int:
        """Tokens in the agent's KV cache."""
        return len(self.token_ids)

    @property
    def is_found_by_content(self) -> bool:
        """Return whether prompts that begin like it may continue it, besides those with its id."""
        is_whole = not self.is_truncated and self.edited is None
        return is_whole and not self.provenance.is_fork and not self.is_private

    @property
    def is_private(self) -> bool:
        """Return whether no other agent may begin with its memory."""
        return self.settings is not None and self.settings.is_private

    @property
    def is_truncated(self) -> bool:
        """Return whether the record lost its end: its text begins like conversations of others."""
        return self.provenance.truncated_by is not None

    @property
    def refs(self) -> list[BlockRef]:
        """All blocks that the manifest refers to, in order and with repetitions."""
        places = (*self.windows, *self.states)
        return self.pieces.blocks + [place.block for place in places]

    @property
    def branch_refs(self) -> list[BlockRef]:
        """Blocks of its branches."""
        return [ref for branch in self.branches or () for ref in branch.refs]

    @property
    def kept_refs(self) -> list[BlockRef]:
        """All blocks that stay because of the manifest: its own, then those of its branches."""
        return self.refs + self.branch_refs

    @property
    def stored_bytes(self) -> int:
        """Payload bytes of all blocks this manifest refers to."""
        return sum(ref.payload_bytes for ref in self.refs)

    def sealed(self, migration: MigrationId, to: NodeName) -> "Manifest":
        """Return the record as the final one that `migration` takes to another node."""
        return replace(self, state=OwnerState.SEALED, migration=migration, sealed_to=to)

    def as_replica(self, owner: NodeName, epoch: int) -> "Manifest":
        """Return the record as a replica, once another node owns the agent at `epoch`."""
        return replace(
            self,
            state=OwnerState.REPLICA,
            owner=owner,
            epoch=epoch,
            migration=None,
            sealed_to=None,
            branches=None,  # the owner has none of them
        )

    def check(self) -> None:
        """Raise CorruptDataError unless pieces cover exactly the tokens, in order."""
        problem = _problem(self)
        if problem:
            message = f"manifest of revision {self.revision}: {problem}"
            raise CorruptDataError(message)


def _problem(manifest: Manifest) -> str | None:
    return (
        _tokens_problem(manifest)
        or _numbers_problem(manifest)
        or _wished_problem(manifest)
        or _refs_problem(manifest)
        or _pieces_problem(manifest)
        or _placing_problem(manifest)
    )


def _refs_problem(manifest: Manifest) -> str | None:
    branches = manifest.branches or ()
    if len(branches) > BRANCHES_MAX or any(len(b.refs) > 3 * PIECES_MAX for b in branches):
        return "it has too many branches"
    if any(not 0 < branch.tokens_count <= AGENT_TOKENS_MAX for branch in branches):
        return "a branch's number of tokens is out of range"
    for ref in manifest.kept_refs:
        if (len(ref.block_hash), len(ref.checksum)) != (BLOCK_HASH_BYTES, CHECKSUM_BYTES):
            return "a block is not named by digests"
        if not 0 < ref.tokens_count <= BLOCK_TOKENS:
            return "a block's number of tokens is out of range"
        if not 0 <= ref.payload_bytes <= BLOCK_BYTES_MAX:
            return f"a block must have 0 to {BLOCK_BYTES_MAX} bytes"
    return None


def _tokens_problem(manifest: Manifest) -> str | None:
    count = manifest.tokens_count
    if count > AGENT_TOKENS_MAX or len(manifest.token_ends) != count:
        return "token ends do not match token ids"
    if not 0 <= manifest.prompt_tokens_count <= count:
        return "prompt length is out of range"
    return _text_problem(manifest)


def _text_problem(manifest: Manifest) -> str | None:
    ends, text_bytes = manifest.token_ends, len(manifest.text.encode("utf-8", "surrogatepass"))
    if not ends.is_ascending():
        return "token ends go backwards"
    tail_bytes = text_bytes - (ends[-1] if ends else 0)
    if tail_bytes < 0:
        return "token ends run past the text"
    # A detokenizer may have held back the last token's text until its answer ended.
    if tail_bytes > TOKEN_TEXT_BYTES_MAX:
        return "text follows its last token"
    if text_bytes > text_bytes_max(len(ends)):
        return "it has more text than its tokens stand for"
    return manifest.positions.problem(text_bytes) if manifest.positions is not None else None


def _numbers_problem(manifest: Manifest) -> str | None:
    if not (manifest.epoch and is_count(manifest.epoch) and is_count(manifest.revision)):
        return "epoch or revision is out of range"
    if not (is_wall_time(manifest.created_s) and is_wall_time(manifest.used_s)):
        return "a time is out of range"
    if len(manifest.sketch) > SKETCH_PIECES_MAX or not all(map(is_hash, manifest.sketch)):
        return "its sketch is out of range"
    return None


def _wished_problem(manifest: Manifest) -> str | None:
    if len(manifest.directives or ()) > DIRECTIVES_MAX + UNDONE_SHOWN_MAX:
        return "it has too many directives"
    for directive in manifest.directives or ():
        if problem := directive.problem():
            return problem
    if manifest.series is not None and not is_sound_series(manifest.series):
        return "the name of its row series is invalid"
    if problem := _parts_problem(manifest.parts or ()):
        return problem
    return manifest.settings.problem() if manifest.settings is not None else None


def _parts_problem(parts: tuple[OtherParts, ...]) -> str | None:
    if sum(len(each.ids) for each in parts) > 2 * CALL_IDS_KNOWN_MAX:
        return "it lists too many call ids"
    if not all(each.is_valid for each in parts):
        return "a message's parts are invalid"
    return (
        None if all(a.number < b.number for a, b in pairwise(parts)) else "parts are not in order"
    )


def _pieces_problem(manifest: Manifest) -> str | None:
    covered, count = manifest.pieces.tokens_count, manifest.tokens_count
    if covered != count:
        return f"pieces cover {covered} of {count} tokens"
    if manifest.edited is None:
        return None
    return manifest.edited.problem(manifest.pieces, manifest.token_ids)


def _placing_problem(manifest: Manifest) -> str | None:
    if manifest.edited is not None and manifest.states:
        return "a cache with recurrent state was edited"
    kinds = ((manifest.windows, CacheGroup.WINDOW), (manifest.states, CacheGroup.STATE))
    for places, group in kinds:
        if any(place.block.group is not group for place in places):
            return f"a block is not of the group {group}"
        is_edited = manifest.edited is not None and group is CacheGroup.WINDOW
        if not (_are_of_pieces(manifest) if is_edited else _are_on_grid(places)):
            return "a block does not start at a block boundary"
        if any(place.end > manifest.tokens_count for place in places):
            return "a block ends after the last token"
        if any(a.end >= b.end for a, b in pairwise(places)):
            return "blocks are not in order"
    return None


def _are_on_grid(places: tuple[Placed, ...]) -> bool:
    return all(place.start >= 0 and place.start % BLOCK_TOKENS == 0 for place in places)


def _are_of_pieces(manifest: Manifest) -> bool:
    """Return whether each window block has the tokens of the piece that ends there.

    Of an edited cache the piece may be a part of both.
    """
    pieces = manifest.pieces
    ends = accumulate(piece.tokens_count for piece in pieces)
    counts = dict(zip(ends, (piece.block.tokens_count for piece in pieces), strict=True))
    return all(counts.get(place.end) == place.block.tokens_count for place in manifest.windows)


@lru_cache(maxsize=PACKED_PIECES_MAX)
def _packed_piece(piece: Piece) -> bytes:
    """Pack one piece; all but the last of a record were in the one before it."""
    return pack(piece)


_ENVELOPE = Envelope(Manifest, "manifest", MAGIC, MANIFEST_BYTES_MAX)


def encode_manifest(manifest: Manifest) -> bytes:
    """Serialize as magic, checksum, msgpack; token lists as little-endian u32."""
    manifest.check()
    body = pack_fields(manifest, {"pieces": [_packed_piece(piece) for piece in manifest.pieces]})
    return _ENVELOPE.seal(body)


def decode_manifest(raw: bytes) -> Manifest:
    """Parse what `encode_manifest` wrote; raise CorruptDataError for anything else."""
    manifest = _ENVELOPE.open(raw)
    manifest.check()
    return manifest
