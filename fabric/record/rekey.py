"""Records exported from a fabric, or imported into one whose block names differ.

Block names are keyed by cluster and tenant, checksums by nothing: an imported record keeps its
checksums, and its names are recomputed from its tokens. Nothing else in it is trusted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from fabric.errors import RejectedError
from fabric.ids import AgentKey, BlockHash, NodeName, parse_agent_id
from fabric.kvcache.block_chain import BlockRef, BlockSpan
from fabric.kvcache.block_file import payload_bytes
from fabric.kvcache.cache_spec import CacheGroup, ModelCacheSpec
from fabric.kvcache.hashing import LINEAGE_BYTES, ROOT_PARENT, block_hash, edited_parent
from fabric.record.hibernation_file import HibernationHeader, require_sound
from fabric.record.lenders import Lender, are_too_many, merge_lenders
from fabric.record.manifest import Manifest, OwnerState, Placed
from fabric.record.piece_table import PieceTable
from fabric.record.provenance import Provenance, TruncatedBy
from fabric.record.stored_part import named_blocks, trim_restore_points, truncate_before_edits


@dataclass(frozen=True, slots=True)
class RekeyedRecord:
    """Record with this fabric's block names, and its blocks in file order."""

    record: Manifest
    blocks: tuple[tuple[BlockRef, BlockSpan], ...]


def portable_record(record: Manifest, window_tokens: int) -> Manifest:
    """Return the record for a file: what continuing needs, without owner or claims."""
    return replace(
        trim_restore_points(record, window_tokens),
        state=OwnerState.OWNED,
        migration=None,
        sealed_to=None,
        pinned=False,
        branches=None,
        provenance=_of_context(record),
    )


def rekey_record(
    record: Manifest,
    header: HibernationHeader,
    spec: ModelCacheSpec,
    salt: bytes,
    vocabulary_size: int,
) -> RekeyedRecord:
    """Name the record's blocks under `salt`; raise RejectedError unless all of it fits.

    The lengths of all blocks are checked against the model's: they may be allocated.
    """
    _check_plain(record, header, vocabulary_size)
    record = _with_new_head(replace(record, branches=None), salt)
    places = [(_rename_block(ref, span), span) for ref, span in named_blocks(record, salt)]
    _require(len(places) == len(record.refs))
    ends = {span.end for ref, span in places if ref.group is CacheGroup.FULL}
    _require(record.edited is not None or all(place.end in ends for place in record.windows))
    for ref, span in places:
        _check_size(ref, span, spec)
    _require(len(places) == header.blocks_count)
    _require(sum(ref.payload_bytes for ref, _ in places) == header.payload_bytes)
    named = [ref for ref, _ in places]
    first = len(record.pieces)
    second = first + len(record.windows)
    pieces = zip(record.pieces, named[:first], strict=True)
    rekeyed = replace(
        record,
        pieces=PieceTable(tuple(replace(piece, block=ref) for piece, ref in pieces)),
        windows=_place_blocks(record.windows, named[first:second]),
        states=_place_blocks(record.states, named[second:]),
    )
    return RekeyedRecord(rekeyed, tuple(places))


def with_new_owner(
    record: Manifest, key: AgentKey, owner: NodeName, epoch: int, wall_s: float
) -> Manifest:
    """Return the record of the same context under another name, owner and epoch."""
    return replace(
        record,
        tenant=key[0],
        agent=key[1],
        owner=owner,
        epoch=epoch,
        revision=record.revision + 1,
        state=OwnerState.OWNED,
        created_s=min(record.created_s, wall_s),
        used_s=wall_s,
        migration=None,
        sealed_to=None,
        pinned=False,
        branches=None,
        provenance=_of_context(record),
    )


def derived_from(record: Manifest, source: Lender) -> Manifest:
    """Note the agent that a copy under another name was made of, as a lender of edited memory.

    Rows kept after an edit may depend on removed text, which the copy's own text does not have.
    """
    head = record.edited
    if head is None:
        return record
    lenders = merge_lenders(head.known_lenders, (source,))
    if are_too_many(lenders):
        return truncate_before_edits(record)
    return replace(record, edited=replace(head, lenders=lenders))


def _with_new_head(record: Manifest, salt: bytes) -> Manifest:
    """Name the blocks of an edited head under `salt`; the names after it follow from these.

    A block that follows on one of the record's own does so again. What others followed on is not
    in the file: they get a parent that no unedited block has.
    """
    head = record.edited
    if head is None:
        return record
    names: dict[BlockHash, BlockHash] = {ROOT_PARENT: ROOT_PARENT}
    pieces, origins = list(record.pieces), []
    for at, origin in enumerate(head.origins):
        old = pieces[at].block
        lineage = blake2b(origin.parent, digest_size=LINEAGE_BYTES).digest()
        parent = names.get(origin.parent) or edited_parent(salt, ROOT_PARENT, lineage)
        name = block_hash(salt, record.fingerprint, parent, origin.tokens)
        _require(names.setdefault(old.block_hash, name) == name)
        pieces[at] = replace(pieces[at], block=replace(old, block_hash=name))
        origins.append(replace(origin, parent=parent))
    renamed = replace(head, origins=tuple(origins))
    return replace(record, pieces=PieceTable(tuple(pieces)), edited=renamed)


def _of_context(record: Manifest) -> Provenance:
    """Return the part of the provenance that stays true for another owner."""
    by = TruncatedBy.HIBERNATED if record.is_truncated else None
    provenance = record.provenance
    return Provenance(truncated_by=by, answers=provenance.answers, turns=provenance.turns)


def _check_plain(record: Manifest, header: HibernationHeader, vocabulary_size: int) -> None:
    _require(record.fingerprint == header.fingerprint)
    _require(record.agent == header.agent)
    _require((record.epoch, record.revision) == (header.epoch, header.revision))
    _require(record.tokens_count == header.tokens_count)
    origins = record.edited.origins if record.edited is not None else ()
    ids = (record.token_ids, *(origin.tokens for origin in origins))
    _require(max(map(max, ids)) < vocabulary_size)  # a larger one would be read out of bounds
    if record.group is not None:
        try:
            parse_agent_id(record.group)
        except RejectedError:
            _require(holds=False)


def _rename_block(ref: BlockRef, span: BlockSpan) -> BlockRef:
    _require(ref.group is span.group)
    return replace(ref, block_hash=span.block_hash)


def _check_size(ref: BlockRef, span: BlockSpan, spec: ModelCacheSpec) -> None:
    _require(ref.group is CacheGroup.FULL or ref.group in spec.groups)
    _require(ref.tokens_count == span.end - span.start)
    _require(ref.payload_bytes == payload_bytes(spec, ref.tokens_count, ref.group))


def _place_blocks(places: Sequence[Placed], refs: Sequence[BlockRef]) -> tuple[Placed, ...]:
    return tuple(Placed(ref, place.end) for place, ref in zip(places, refs, strict=True))


def _require(holds: bool) -> None:  # noqa: FBT001 - reads as a sentence
    require_sound(holds, "its record contradicts itself, its header or the model")
