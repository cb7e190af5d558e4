"""Which beginnings several agents share: what a node without memory should have first.

    alice  [ system ][ tools ][ …      all three begin with `system`, two with `tools` behind it:
    bob    [ system ][ tools ][ …      either end is one that a new agent may go on from
    carol  [ system ][ …

Counted by names, which follow from tenant, model and tokens: a beginning is one tenant's, and none
that an edit had a part in.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

from fabric.ids import BlockHash
from fabric.limits import BLOCK_TOKENS, SPAN_SHARERS_MIN
from fabric.record.layout import unedited_layout, unedited_pieces
from fabric.record.manifest import Manifest, OwnerState
from fabric.record.restore_plan import essential
from fabric.u32s import U32s
from node.limits import SPAN_OFFERS_MAX, SPAN_TRIES_MAX
from node.store.agent_store import AgentStore


@dataclass(frozen=True, slots=True)
class PopularSpan:
    """A record cut down to what `sharers` agents begin with: no text, nothing of the agent."""

    record: Manifest
    sharers: int


def popular_spans(
    store: AgentStore, records: Sequence[Manifest], bytes_max: int
) -> list[PopularSpan]:
    """Choose among what these records share, the most shared first; reads no disk."""
    chains = [_chain(record) for record in records]
    counts = Counter(name for chain in chains for name in chain)
    ends: dict[BlockHash, list[tuple[Manifest, int]]] = defaultdict(list)
    for lender, chain in zip(records, chains, strict=True):
        for name, count in _ends(chain, counts):
            ends[name].append((lender, count))
    found: list[PopularSpan] = []
    taken: set[object] = set()
    size_bytes = 0
    for name in sorted(ends, key=lambda name: (-counts[name], ends[name][0][1])):
        room_bytes = bytes_max - size_bytes
        fitting = (
            (record, min(count, _fitting(record, taken, room_bytes)))
            for record, count in ends[name][:SPAN_TRIES_MAX]
        )
        cuts = (_cut(store, record, count) for record, count in fitting)
        record = next((cut for cut in cuts if cut is not None), None)
        if record is None:
            continue
        more = set(record.refs) - taken
        more_bytes = sum(ref.payload_bytes for ref in more)
        if not more or size_bytes + more_bytes > bytes_max:
            continue
        taken.update(more)
        size_bytes += more_bytes
        found.append(PopularSpan(record, counts[name]))
        if len(found) == SPAN_OFFERS_MAX:
            break
    return found


def _chain(record: Manifest) -> list[BlockHash]:
    """Name the full blocks that a record begins with, up to its first edit."""
    blocks = unedited_pieces(record).blocks
    return [ref.block_hash for ref in blocks if ref.tokens_count == BLOCK_TOKENS]


def _ends(
    chain: Sequence[BlockHash], counts: Counter[BlockHash]
) -> Iterator[tuple[BlockHash, int]]:
    """Yield where some of those who begin so leave, and how many blocks lie before."""
    for at, name in enumerate(chain, 1):
        if counts[name] < SPAN_SHARERS_MIN:
            return
        if at == len(chain) or counts[chain[at]] < counts[name]:
            yield name, at


def _fitting(record: Manifest, taken: AbstractSet[object], room_bytes: int) -> int:
    """Count the first blocks of a record that fit beside those that are taken anyway."""
    sizes = (0 if ref in taken else ref.payload_bytes for ref in record.pieces.blocks)
    return sum(1 for _ in takewhile(lambda end: end <= room_bytes, accumulate(sizes)))


def _cut(store: AgentStore, record: Manifest, blocks_count: int) -> Manifest | None:
    """Cut a record where it can be gone on from, at its first blocks' end at the latest."""
    layout = unedited_layout(record, blocks_count * BLOCK_TOKENS)
    # A block that is found by its name alone ends where a full one does, and so do its states.
    states = tuple(state for state in layout.states if state.end % BLOCK_TOKENS == 0)
    layout = replace(layout, states=states)
    if store.blocks.missing(layout.refs):
        return None
    layout = store.restorable(layout)
    count = layout.tokens_count
    if not count:
        return None
    cut = Manifest(
        tenant=record.tenant,
        agent=record.agent,
        fingerprint=record.fingerprint,
        owner=record.owner,
        epoch=record.epoch,
        revision=record.revision,
        state=OwnerState.REPLICA,
        text="",
        token_ids=record.token_ids[:count],
        token_ends=U32s([0] * count),
        prompt_tokens_count=0,
        pieces=layout.pieces,
        windows=layout.windows,
        states=layout.states,
    )
    return essential(cut, store.spec.window_tokens)
