"""Index from chunks of tokens to the records of a node that contain them.

Results are hints, which callers check. A record is read when a lookup first needs it. When the
index is full, it drops the chunks of the record that was read longest ago.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fabric.ids import AgentKey
from fabric.record.manifest import Manifest
from fabric.turn.chunks import Tokens, chunk_digest, chunks
from node.limits import SPAN_CHUNKS_MAX, SPAN_INDEXED_TOKENS_MAX, SPAN_PLACES_MAX


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk of a record's tokens, with its digest."""

    start: int
    end: int
    digest: bytes


def digest_chunks(salt: bytes, tokens: Tokens, cuts: Collection[int]) -> tuple[Chunk, ...]:
    """Cut tokens into chunks and hash each; takes time proportional to the tokens."""
    return tuple(
        Chunk(start, end, chunk_digest(salt, tokens[start:end]))
        for start, end in chunks(tokens, cuts)
    )


class SpanIndex:
    """Chunks of one node's records; used on its event loop."""

    def __init__(self, chunks_max: int = SPAN_CHUNKS_MAX) -> None:
        self._chunks_max = chunks_max
        self._unread: OrderedDict[AgentKey, Manifest] = OrderedDict()
        self._read: OrderedDict[AgentKey, tuple[Chunk, ...]] = OrderedDict()
        self._places: dict[bytes, dict[AgentKey, int]] = defaultdict(dict)
        self._count = 0

    def __len__(self) -> int:
        """Count the indexed chunks."""
        return self._count

    def note(self, key: AgentKey, saved: Manifest | None) -> None:
        """Add an agent's newest record to the unread ones; remove the agent for None."""
        if saved is None:
            self.remove(key)
            return
        self._unread[key] = saved
        self._unread.move_to_end(key)

    def remove(self, key: AgentKey) -> None:
        """Remove an agent's record and chunks."""
        self._unread.pop(key, None)
        self._drop(key)

    def unread(self) -> list[Manifest]:
        """Return the newest unread records, up to SPAN_INDEXED_TOKENS_MAX tokens."""
        records: list[Manifest] = []
        count = 0
        for record in reversed(self._unread.values()):
            count += record.tokens_count
            if records and count > SPAN_INDEXED_TOKENS_MAX:
                break
            records.append(record)
        return records

    def put(self, record: Manifest, found: Sequence[Chunk]) -> None:
        """Index the chunks of a record, unless it was replaced or removed in the meantime."""
        key = record.key
        if self._unread.get(key) is not record:
            return
        del self._unread[key]
        self._drop(key)
        self._read[key] = chunks = tuple(found[: self._chunks_max])
        self._count += len(chunks)
        for chunk in chunks:
            places = self._places[chunk.digest]
            places[key] = chunk.start
            while len(places) > SPAN_PLACES_MAX:
                del places[next(iter(places))]
        while self._count > self._chunks_max:
            self._drop(next(iter(self._read)))

    def places(self, digest: bytes) -> tuple[tuple[AgentKey, int], ...]:
        """Return the agents that have a chunk and its first token there, last indexed first."""
        return tuple(reversed(self._places.get(digest, {}).items()))

    def _drop(self, key: AgentKey) -> None:
        chunks = self._read.pop(key, ())
        self._count -= len(chunks)
        for chunk in chunks:
            places = self._places.get(chunk.digest, {})
            if places.get(key) == chunk.start:
                del places[key]
            if not places:
                self._places.pop(chunk.digest, None)
