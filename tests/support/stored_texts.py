"""Occurrences of words: in prompts as sent and as rendered, and in caches on disk."""

import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from fabric.ids import AgentId
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.block_file import TOKEN_BYTES
from fabric.limits import MANIFEST_BYTES_MAX
from fabric.record.manifest import Manifest, decode_manifest


@dataclass(frozen=True)
class StoredText:
    """A text that an agent has, and its place."""

    agent: AgentId
    where: str
    text: str


def on_disks(folder: Path, decode: Callable[[list[int]], str]) -> Iterator[StoredText]:
    """Yield each agent's record text and cached tokens from every node's disk.

    Cached tokens are read from the blocks that the record names: all tokens of each block,
    including those that the record does not use.
    """
    for path in sorted(folder.glob("*/*/manifests/*.mf")):
        record = decode_manifest(path.read_bytes()[:MANIFEST_BYTES_MAX])
        where = f"{path.parents[2].name}, {record.state}"
        yield StoredText(record.agent, f"record on {where}", record.text)
        tokens = {ref: block_tokens(path.parents[1], ref) for ref in record.kept_refs}
        assert cached_tokens(record, tokens) == list(record.token_ids), "not the record's"
        for ref, ids in tokens.items():
            yield StoredText(record.agent, f"block {ref.name} on {where}", decode(ids))
        yield StoredText(record.agent, f"memory on {where}", decode(cached_tokens(record, tokens)))


def block_tokens(folder: Path, ref: BlockRef) -> list[int]:
    """Read the tokens at the end of a block's file, of which it has the keys and values."""
    raw = (folder / "blocks" / f"{ref.name}.{ref.group}").read_bytes()[
        -ref.tokens_count * TOKEN_BYTES :
    ]
    return array.array("I", raw).tolist()


def cached_tokens(record: Manifest, tokens: Mapping[BlockRef, list[int]]) -> list[int]:
    """Concatenate the tokens of a record's pieces."""
    parts = (tokens[piece.block][piece.start : piece.end] for piece in record.pieces)
    return [token for part in parts for token in part]


def leaks(found: Iterable[StoredText], may_have: Mapping[str, AbstractSet[str]]) -> list[str]:
    """List the agents that have words that they must not have."""
    return [
        f"{stored.agent} has {words!r} in its {stored.where}"
        for stored in found
        for words, agents in may_have.items()
        if words in stored.text and stored.agent not in agents
    ]
