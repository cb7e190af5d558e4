"""Measure the cost of saving a turn of 50 tokens, after a short and after a long context.

The node's own saver, store and disk save turns of a synthetic cache of a real model's geometry,
without the model. Every turn replaces the one before it behind the same tokens, which end at the
same offset in a block, so that all write a tail block of one length. Contexts alternate.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from mlx_lm.tokenizer_utils import load

from benchmarks.memory import GEOMETRIES, half_precision_spec
from benchmarks.report import Limit, Report, say
from fabric.hosting.clock import SystemClock
from fabric.ids import AgentId, Fingerprint, NodeName, OperationId, TenantId
from fabric.record.layout import unedited_layout
from fabric.record.turn_history import TurnNote
from fabric.settings import NodeSettings
from fabric.turn.generation import (
    Admitted,
    CacheTier,
    FinishReason,
    GenerateRequest,
    Identity,
    IdentityKind,
    MatchKind,
    Sampling,
)
from fabric.turn.prompt_plan import PromptPlan
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.assembly import assemble
from node.dialect.answer_delta import AnswerDelta
from node.engine.engine_thread import EngineThread
from node.engine.sequence import Ended
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.engine import Engine
from node.mlx.loaded_model import BUNDLED
from node.mlx.model_limits import ModelLimits
from node.mlx.resident_cache import ResidentCache
from node.node import Node, NodeResources
from node.prompt.directed_request import DirectedRequest
from node.prompt.earlier_answers import KnownAnswers, ShownAnswer, locate_messages, restore_answers
from node.prompt.pipeline import PlannedPrompt
from node.runtime.identity import NodeConfig, NodeIdentity, ServedModel
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.store.block_store import BlockStore
from node.store.manifest_store import ManifestStore
from node.store.posix_disk import Part, PosixDisk
from node.store.service_time import ServiceTime
from node.store.tombstones import DIRECTORY as ERASED
from node.store.tombstones import TombstoneStore
from node.transfer.server import TransferServer
from node.turn.prepared import Prepared
from node.turn.saver import Saver
from node.turn.turn_timer import TurnTimer

DESCRIPTION = "CPU time and bytes to save a 50-token turn at 1k and at 32k tokens"

MODEL = "Llama 3.1 8B"
TOKENIZER = "recall"  # a bundled model's; saving is the same with any
CONTEXTS, QUICK_CONTEXTS = (1_024, 8_192, 32_768), (1_024, 4_096)
BEHIND_BLOCK_TOKENS = 103  # offset of the turn's beginning in a block: it ends half-way on average
PROMPT_TOKENS, ANSWER_TOKENS = 20, 30
WORD = "word"
ROUNDS = 60
VOCABULARY_SIZE = 1 << 17
NAMING_S = 0.01  # for naming the prompt's blocks, during the answer's decoding
TIMES_MAX = 1.2  # of the shortest context's cost
KEY = bytes(range(32))
FINGERPRINT = Fingerprint(b"t" * 32)
TENANT = TenantId("bench")


class CountingDisk(PosixDisk):
    """Disk that counts written bytes."""

    written_bytes = 0

    def publish(self, name: str, parts: Sequence[Part]) -> None:
        """Publish and count a record."""
        self.written_bytes += sum(memoryview(part).nbytes for part in parts)
        super().publish(name, parts)

    def publish_ordered(self, name: str, parts: Sequence[Part]) -> None:
        """Publish and count a block."""
        self.written_bytes += sum(memoryview(part).nbytes for part in parts)
        super().publish_ordered(name, parts)


@dataclass(frozen=True, slots=True)
class Desk:
    """The saving part of a node, and its disk."""

    node: Node
    disk: CountingDisk


@dataclass
class Talk:
    """Conversation of one agent, and the costs of its turns."""

    agent: Agent
    cache: ResidentCache
    held: int = 0  # tokens behind which every turn begins
    cpu_s: list[float] = field(default_factory=list)
    written_bytes: list[int] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--folder", help="where to write")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each context")


def run(arguments: argparse.Namespace) -> Report:
    """Save turns of all contexts alternately."""
    rounds = 3 if arguments.quick else arguments.rounds
    contexts = QUICK_CONTEXTS if arguments.quick else CONTEXTS
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        talks = asyncio.run(_converse(Path(folder), contexts, rounds))
    rows = {f"{count:,} tokens": _row(talk) for count, talk in talks.items()}
    short, long = talks[contexts[0]], talks[contexts[-1]]
    ratios = {
        "CPU time": _ratio(long.cpu_s, short.cpu_s),
        "bytes written": _ratio(long.written_bytes, short.written_bytes),
    }
    span = f"at {contexts[-1]:,} tokens, times that at {contexts[0]:,}"
    return Report(
        {"model": MODEL, "turn_tokens": PROMPT_TOKENS + ANSWER_TOKENS, "rounds": rounds},
        {"turn": rows},
        ratios,
        tuple(
            Limit(f"{name} {span}", ratio, TIMES_MAX, is_least=False)
            for name, ratio in ratios.items()
        ),
        ("CPU time of the whole process, writing and flushing included; lower quartiles",),
    )


def _ratio(long: Sequence[float], short: Sequence[float]) -> float:
    return _quiet(long) / _quiet(short)


def _quiet(costs: Sequence[float]) -> float:
    """Return the lower quartile of equal turns' costs, as other load on the machine only adds."""
    return statistics.quantiles(costs, n=4)[0]


def _row(talk: Talk) -> dict[str, float]:
    return {
        "CPU ms, lower quartile": 1e3 * _quiet(talk.cpu_s),
        "CPU ms, median": 1e3 * statistics.median(talk.cpu_s),
        "MB written": min(talk.written_bytes) / 1e6,
    }


async def _converse(folder: Path, contexts: Sequence[int], rounds: int) -> dict[int, Talk]:
    desk = _open_desk(folder)
    talks = {}
    for count in contexts:
        say(f"a context of {count:,} tokens")
        held = count + BEHIND_BLOCK_TOKENS
        cache = ResidentCache(
            desk.node.resources.identity.spec, held + PROMPT_TOKENS + ANSWER_TOKENS
        )
        agent = desk.node.resources.table.create(TENANT, AgentId(f"at-{count}"), None, 1)
        talks[count] = Talk(agent, cache)
        await _take_turn(desk, talks[count], held - ANSWER_TOKENS)
        talks[count].held = held
    order = list(talks.values())
    for _ in range(rounds + 1):
        order.append(order.pop(0))  # so that none always follows the longest
        for talk in order:
            await _take_turn(desk, talk, PROMPT_TOKENS)
    desk.node.resources.engine.stop()
    desk.node.resources.transfers.stop()
    desk.node.resources.workers.close()
    for talk in talks.values():
        del talk.cpu_s[:2], talk.written_bytes[:2]  # the first prompt, and a turn to warm up
    return talks


def _open_desk(folder: Path) -> Desk:
    spec, name, clock = half_precision_spec(GEOMETRIES[MODEL]), NodeName("bench"), SystemClock()
    disk = CountingDisk(folder, "full")
    disk.recover()
    blocks = BlockStore(disk, spec, FINGERPRINT)
    config = NodeConfig(name, folder, MODEL, KEY, NodeSettings(), "127.0.0.1", 1)
    engine = EngineThread(clock, active_max=1, waiting_max=1, exact_chunks=False)
    without_model = cast("Any", None)  # saving a turn computes no token
    limits = ModelLimits(vocabulary_size=VOCABULARY_SIZE)
    engine.start(lambda: (Engine(without_model, spec, limits=limits), None))
    model = ServedModel(MODEL, spec, FINGERPRINT, context_tokens_max=1 << 17, vocabulary_size=0)
    node = assemble(
        NodeResources(
            identity=NodeIdentity(config, model),
            clock=clock,
            engine=engine,
            tokenizer=ChatTokenizer(load(BUNDLED / TOKENIZER)),
            store=AgentStore(blocks, ManifestStore(disk, KEY), KEY, FINGERPRINT, spec),
            table=AgentTable(name, FINGERPRINT, clock),
            erased=TombstoneStore(PosixDisk(folder / ERASED, "full"), KEY),
            transfers=TransferServer(name, KEY, FINGERPRINT, blocks, clock, host=config.host),
            service_time=ServiceTime(name, clock),
            workers=Workers(2),
        )
    )
    return Desk(node, disk)


def _turn(desk: Desk, talk: Talk, prompt_tokens: int) -> tuple[Saver, Ended]:
    """Prepare the conversation's next turn: its saver, and the end of its answer."""
    agent, cache = talk.agent, talk.cache
    old, width = agent.manifest, len(WORD)
    rng = np.random.default_rng(old.revision)
    new: list[int] = rng.integers(0, VOCABULARY_SIZE, prompt_tokens + ANSWER_TOKENS).tolist()
    ids = [*old.token_ids[: talk.held], *new[:prompt_tokens]]
    plan = PromptPlan(
        (WORD * len(ids)).encode(),
        ids,
        list(range(width, width * len(ids) + 1, width)),
        talk.held,
        MatchKind.DIVERGE,
        "",
        talk.held,
    )
    layout = unedited_layout(agent.saved, agent.stored_tokens)
    prepared = Prepared(plan, cache, talk.held, CacheTier.HOT, layout, len(ids))
    identity = Identity(IdentityKind.AGENT, old.agent)
    request = GenerateRequest(OperationId("bench"), TENANT, identity, Sampling(), prompt="")
    ended = Ended(
        FinishReason.STOP,
        AnswerDelta(),
        new[prompt_tokens:],
        WORD * ANSWER_TOKENS,
        [width * (i + 1) for i in range(ANSWER_TOKENS)],
        None,
    )
    restored = restore_answers(locate_messages(request), KnownAnswers())
    prompt = PlannedPrompt(restored, DirectedRequest(request), plan)
    return Saver(desk.node.turns.savers, agent, prepared, prompt, None), ended


def _note(timer: TurnTimer, prompt_tokens: int) -> TurnNote:
    node, tokens = NodeName("node-a"), prompt_tokens
    admitted = Admitted(
        AgentId("a"), node, 1, CacheTier.HOT, MatchKind.DIVERGE, tokens, 0, "it differs there"
    )
    return timer.note(node, admitted, "stop", ANSWER_TOKENS)


async def _take_turn(desk: Desk, talk: Talk, prompt_tokens: int) -> None:
    """Add a prompt and an answer behind the held tokens; count only the saving."""
    saver, ended = _turn(desk, talk, prompt_tokens)
    before_bytes, before_s = desk.disk.written_bytes, time.process_time()
    saver.begin(is_decoding=False)
    await asyncio.sleep(NAMING_S)
    talk.cache.rewind(talk.held)
    talk.cache.assume(talk.held + prompt_tokens + ANSWER_TOKENS)
    request = GenerateRequest(
        OperationId("bench"), TENANT, Identity(IdentityKind.AGENT), Sampling(), prompt=""
    )
    timer = TurnTimer(desk.node.resources.clock, request)
    durable = await saver.commit(ended, ShownAnswer(), None, lambda: _note(timer, prompt_tokens))
    talk.cpu_s.append(time.process_time() - before_s)
    talk.written_bytes.append(desk.disk.written_bytes - before_bytes)
    assert durable, desk.node.health.degraded
