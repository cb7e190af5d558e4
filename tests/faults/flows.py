"""Everything that changes a node's disk, as steps of one history through the real agent store.

The steps: a save, a save over it (sweep), a save of a neighbour that shares a block, a migration
in, a migration in over an older record, an erasure, the quarantine of a record, the quarantine of
a block, a save after it, old windows trimmed from a record, a save, the eviction of an agent from
the disk, and several directives for an agent that stays, added and undone. Records have full,
window and state blocks. After any cut the records are, byte for byte, those before or after the
current step, and nothing else lies in the blocks' folder.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from fabric.edit_mode import EditMode
from fabric.errors import CorruptDataError
from fabric.ids import AgentId, BlockHash, OperationId
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.block_file import payload_bytes
from fabric.kvcache.cache_spec import (
    CacheGroup,
    LayerKind,
    LayerSpec,
    ModelCacheSpec,
    TensorSpec,
)
from fabric.kvcache.hashing import (
    ROOT_PARENT,
    agent_digest,
    block_hash,
    group_hash,
    payload_checksum,
    token_bytes,
)
from fabric.limits import BLOCK_TOKENS
from fabric.record.directive import Directive
from fabric.record.manifest import Manifest, Placed
from fabric.record.piece_table import PieceTable
from fabric.record.stored_part import trim_restore_points
from node.store.agent_store import AgentStore
from node.store.block_store import BlockStore
from node.store.manifest_store import ManifestStore
from tests.support.blocks import CLUSTER_KEY, FINGERPRINT, SALT, TENANT, make_manifest
from tests.support.layers import attention_layer

_HEADS = {"bits": 4, "group_size": 64, "dtype": "F16"}
SPEC = ModelCacheSpec((
    attention_layer(LayerKind.FULL, 1, (64, 64), **_HEADS),
    attention_layer(LayerKind.WINDOW, 1, (64, 64), **_HEADS, window_tokens=BLOCK_TOKENS),
    LayerSpec(LayerKind.RECURRENT, states=(TensorSpec("state.0", "F32", (1, 8)),)),
))  # fmt: skip
GROUPS = (CacheGroup.FULL, CacheGroup.WINDOW, CacheGroup.STATE)


@dataclass(frozen=True)
class Block:
    """One group's block at one place of a context."""

    parent: BlockHash
    tokens: tuple[int, ...]
    kv: bytes
    ref: BlockRef


@dataclass(frozen=True)
class Context:
    """A record and the blocks that it refers to."""

    record: Manifest
    blocks: tuple[Block, ...]

    @property
    def key(self) -> AgentId:
        return self.record.agent


def record_name(context: Context) -> str:
    return f"manifests/{agent_digest(CLUSTER_KEY, TENANT, context.key)}.mf"


def make_blocks(tokens: tuple[int, ...], parent: BlockHash) -> dict[CacheGroup, Block]:
    chain = block_hash(SALT, FINGERPRINT, parent, tokens)
    blocks = {}
    for group in GROUPS:
        kv = random.Random(f"{group}{tokens[-1]}").randbytes(SPEC.kv_bytes(len(tokens), group))
        checksum = payload_checksum([kv, token_bytes(tokens)])
        size = payload_bytes(SPEC, len(tokens), group)
        ref = BlockRef(group_hash(SALT, chain, group), checksum, len(tokens), size, group)
        blocks[group] = Block(parent, tokens, kv, ref)
    return blocks


def make_context(agent: str, tokens: tuple[int, ...], revision: int, epoch: int = 1) -> Context:
    """Make a context with its full and window blocks and the state behind its last token."""
    used, pieces, windows, states = [], [], [], []
    parent = ROOT_PARENT
    for start in range(0, len(tokens), BLOCK_TOKENS):
        cut = tokens[start : start + BLOCK_TOKENS]
        end = start + len(cut)
        blocks = make_blocks(cut, parent)
        full, window, state = (blocks[group] for group in GROUPS)
        pieces.append(full.ref)
        windows.append(Placed(window.ref, end))
        used += [full, window]
        if end == len(tokens):
            states.append(Placed(state.ref, end))
            used.append(state)
        parent = full.ref.block_hash
    record = replace(
        make_manifest([], revision, epoch, AgentId(agent)),
        text="x" * len(tokens),
        token_ids=tokens,
        token_ends=tuple(range(1, len(tokens) + 1)),
        prompt_tokens_count=len(tokens),
        pieces=PieceTable().append(pieces),
        windows=tuple(windows),
        states=tuple(states),
    )
    return Context(record, tuple(used))


SHARED = tuple(range(BLOCK_TOKENS))
A1 = make_context("a", (*SHARED, 1_001, 1_002, 1_003), 1)
A2 = make_context("a", (*SHARED, 2_001, 2_002), 2)
B1 = make_context("b", (*SHARED, 3_001), 1)
C1 = make_context("c", (4_001, 4_002, 4_003, 4_004), 7, epoch=3)
A3 = make_context("a", (*SHARED, 2_001, 2_002, 5_001), 3, epoch=2)
A4 = make_context("a", (*SHARED, 2_001, 2_002, 5_001, 6_001), 4, epoch=2)
_THIN = replace(trim_restore_points(A4.record, 2), revision=5)
A5 = Context(_THIN, tuple(block for block in A4.blocks if block.ref in _THIN.refs))
assert len(A5.blocks) < len(A4.blocks)
D1 = make_context("d", (*SHARED, 7_001), 1)
_DIRECTIVES = tuple(
    Directive(
        OperationId("tidy-up-1"), EditMode.FORGET, f"[{at}]", message_digest=bytes(16), nth=at
    )
    for at in range(5)
)
_UNDONE = tuple(replace(each, undone_s=1.0, replacement=None) for each in _DIRECTIVES[:3])
D2 = Context(replace(D1.record, revision=2, directives=_DIRECTIVES), D1.blocks)
D3 = Context(replace(D1.record, revision=3, directives=(*_UNDONE, *_DIRECTIVES[3:])), D1.blocks)
HURT = A3.blocks[3]  # the window block behind the shared one
assert HURT.ref.group is CacheGroup.WINDOW

# Contexts on disk after each step.
STATES: list[list[Context]] = [
    [], [A1], [A2], [A2, B1], [A2, B1, C1], [A3, B1, C1], [A3, C1], [A3], [A3], [A4],
    [A5], [A5, D1], [D1], [D2], [D3],
]  # fmt: skip
RECORD_LOST, BLOCK_LOST, LAST = 7, 8, len(STATES) - 1
BLOCKS = {block.ref: block for state in STATES for context in state for block in context.blocks}


@dataclass
class World:
    """A process with the disk: it recovers, then takes step by step."""

    disk: object
    damage: Callable[[str], None]
    store: AgentStore = field(init=False)
    held: dict[AgentId, Manifest] = field(default_factory=dict)
    lost_count: int = 0

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        """Recover as a node does when it starts."""
        self.disk.recover()
        records = ManifestStore(self.disk, CLUSTER_KEY)
        blocks = BlockStore(self.disk, SPEC, FINGERPRINT)
        self.store = AgentStore(blocks, records, CLUSTER_KEY, FINGERPRINT, SPEC)
        self.held = {record.agent: record for record in self.store.recover()}
        self.lost_count = records.lost_count

    def durable_step(self) -> int:
        """Return the last step whose outcome is on disk, or -1."""
        found = sorted(self.held.values(), key=lambda record: record.agent)
        for step in range(LAST, -1, -1):
            if found == [context.record for context in STATES[step]]:
                # The lost block's record looks the same before and after.
                return step - 1 if step == BLOCK_LOST else step
        return -1

    def steps(self) -> list[Callable[[], None]]:
        return [
            lambda: None,
            lambda: self.save(A1),
            lambda: self.save(A2),
            lambda: self.save(B1),
            lambda: self.move_in(C1),
            lambda: self.move_in(A3),
            lambda: self.erase(B1),
            self.lose_record,
            self.lose_block,
            lambda: self.save(A4),
            lambda: self._publish(A5),
            lambda: self.save(D1),
            lambda: self.evict(A5),
            lambda: self.save(D2),
            lambda: self.save(D3),
        ]

    # --- the steps ---------------------------------------------------------------------------

    def save(self, context: Context) -> None:
        blocks = self.store.blocks
        for block in context.blocks:
            if not blocks.has(block.ref):
                ref, parts = block.ref, [memoryview(block.kv)]
                blocks.put(block.parent, ref.block_hash, block.tokens, parts, ref.group)
        self._publish(context)

    def move_in(self, context: Context) -> None:
        blocks = self.store.blocks
        for block in context.blocks:
            if not blocks.has(block.ref):
                payload = block.kv + token_bytes(block.tokens)
                blocks.adopt(block.ref, block.parent, block.tokens, memoryview(payload))
        self._publish(context)

    def _publish(self, context: Context) -> None:
        self.store.publish(context.record, self.held.get(context.key))
        self.held[context.key] = context.record

    def erase(self, context: Context) -> None:
        record = self.held.pop(context.key)
        self.store.erase_blocks(self.store.erase_record((TENANT, context.key), record))

    def evict(self, context: Context) -> None:
        self.store.evict([self.held.pop(context.key)])

    def lose_record(self) -> None:
        self.damage(record_name(C1))
        self.open()

    def lose_block(self) -> None:
        self.damage(f"blocks/{HURT.ref.name}.window")
        try:
            self.load(HURT)
        except CorruptDataError:
            return
        message = "a damaged block was read"
        raise AssertionError(message)

    def load(self, block: Block) -> bytes:
        into = bytearray(len(block.kv))
        self.store.blocks.load_into(block.ref, block.parent, block.tokens, [memoryview(into)])
        return bytes(into)

    # --- invariants --------------------------------------------------------------------------

    def problems(self, acknowledged: int) -> Iterator[str]:
        """Yield the problems after a restart, given the last acknowledged step."""
        done = self.durable_step()
        if done < 0:
            yield f"a mixed state after step {acknowledged}: {sorted(self.held)}"
            return
        possible = {acknowledged, acknowledged + 1}
        if not possible & ({done, done + 1} if done == BLOCK_LOST - 1 else {done}):
            yield f"the state of step {done} although {acknowledged} was acknowledged"
        if self.lost_count and RECORD_LOST not in possible:
            yield "a record was lost"
        expected_refs = {block.ref for context in STATES[done] for block in context.blocks}
        for ref in expected_refs:
            yield from self._block_problem(BLOCKS[ref], may_miss=acknowledged >= RECORD_LOST)
        names = {f"{ref.name}.{ref.group.value}" for ref in expected_refs}
        if surplus := set(self.disk.list_names("blocks")) - names:
            yield f"{len(surplus)} blocks too many"
        yield from self.store.blocks.check_integrity()

    def _block_problem(self, block: Block, *, may_miss: bool) -> Iterator[str]:
        try:
            if self.load(block) != block.kv:
                yield "wrong bytes"
        except CorruptDataError as error:
            if not (may_miss and block is HURT):
                yield f"a record lacks a block: {error.message}"


def take_steps(disk, acknowledge: Callable[[int], None], damage: Callable[[str], None]) -> None:
    """Recover, then take the remaining steps."""
    world = World(disk, damage)
    done = world.durable_step()
    assert done >= 0, "the disk must be sound"
    acknowledge(done)
    for step, take in enumerate(world.steps()):
        if step > done:
            take()
            acknowledge(step)


def problem_after_restart(disk, acknowledged: int, damage) -> str | None:
    """Recover from `disk` as a node does; return the first problem, or None."""
    return next(World(disk, damage).problems(acknowledged), None)
