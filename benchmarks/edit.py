"""Compare ways of serving conversations whose early messages were cleared.

Every agent reads a long history with facts; then an early message is replaced by a stub and the
agent is asked for a fact behind it. Three arms do the same, many agents at once: none (nothing is
reused), prefix (the cache before the edit is), splice (also the cache behind it).
"""

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Limit, Report, say
from benchmarks.workload import Geometry, build_engine, build_model, pattern, resident_caches
from fabric.edit_mode import EditMode
from fabric.ids import AgentId, NodeName, OperationId, TenantId
from fabric.kvcache.arrangement import Move
from fabric.settings import NodeSettings
from fabric.turn.generation import (
    Admitted,
    Delta,
    GenerateRequest,
    Identity,
    IdentityKind,
    Sampling,
)
from fabric.turn.messages import Message, MessageRole
from node.service import NodeConfig, NodeService
from router.cli.demo.demo_script import CLOSINGS, OPENINGS, THINGS, VALUES

DESCRIPTION = "edited conversations: reusing nothing, the prefix, or also the cache after the edit"

AGENTS_TOGETHER, QUICK_AGENTS_TOGETHER = (1, 4, 8, 16), (1,)
ARMS = ("none", "prefix", "splice")
NOTES, QUICK_NOTES = 8, 2  # sentences of each message, about 30 tokens each
MESSAGES = 6
CLEARED = 1  # the message that is replaced, of those
HITS_MORE_MIN = 0.11
APPLY_SHARE_MAX = 0.05
APPLIED_TOKENS, QUICK_APPLIED_TOKENS = 32_768, 256
APPLY_MODEL = Geometry(512, 1_536, 2, 8, 2, 64, 2_048)
QUICK_APPLY_MODEL = Geometry(128, 256, 1, 2, 1, 64, 512)
APPLY_ROUNDS, QUICK_APPLY_ROUNDS = 5, 2
CHUNK = 256
ANSWER_TOKENS = 24
NOTE = "rearranged_s is moving rows alone; planning, records and the disk are in first_token_s"
_operations = itertools.count()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--seed", type=int, default=0, help="of the stories (default: 0)")
    parser.add_argument("--model", default="recall", help="a bundled model or a folder")


@dataclass(frozen=True, slots=True)
class Story:
    """Messages of one agent, each with a fact in it."""

    messages: tuple[str, ...]
    questions: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """Time and answer of one turn."""

    first_s: float
    prompt_tokens: int
    cached_tokens: int
    text: str


def run(arguments: argparse.Namespace) -> Report:
    """Compare the arms at each number of agents, then measure the cost of an edit itself."""
    quick = arguments.quick
    numbers = QUICK_AGENTS_TOGETHER if quick else AGENTS_TOGETHER
    notes = QUICK_NOTES if quick else NOTES
    figures: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        service = _service(Path(folder), arguments.model)
        service.start()
        try:
            for count in numbers:
                rng = random.Random(f"{arguments.seed}:{count}")
                stories = [_story(rng, number, notes) for number in range(count)]
                turns = {arm: _play(service, f"{arm}-{count}", stories) for arm in ARMS}
                figures |= {f"{count} {arm}": _row(turns[arm], turns, stories) for arm in ARMS}
                ratios |= _compared(count, turns)
        finally:
            service.stop()
    tokens = QUICK_APPLIED_TOKENS if quick else APPLIED_TOKENS
    model = QUICK_APPLY_MODEL if quick else APPLY_MODEL
    rounds = QUICK_APPLY_ROUNDS if quick else APPLY_ROUNDS
    rearranged_s, prefill_s = _cost_of_moving(model, tokens, rounds)
    ratios["rearranging.by_prefill"] = rearranged_s / prefill_s
    parameters = {"model": arguments.model, "agents": list(numbers), "edit_tokens": tokens}
    edit = {"rearranged_s": rearranged_s, "prefill_saved_s": prefill_s}
    limits = _limits(numbers, ratios)
    return Report(parameters, {"arms": figures, **edit}, ratios, limits, (NOTE,))


def _limits(numbers: Sequence[int], ratios: Mapping[str, float]) -> tuple[Limit, ...]:
    limits = [
        Limit(
            "rearranging the cache by the prefill it saves",
            ratios["rearranging.by_prefill"],
            APPLY_SHARE_MAX,
            is_least=False,
        )
    ]
    for count in numbers:
        more, sooner = ratios[f"{count}.hits_more"], ratios[f"{count}.first_by_prefix"]
        limits += [
            Limit(f"cached share above the prefix's, {count} agents", more, HITS_MORE_MIN,
                  is_least=True),
            Limit(f"first token by the prefix's, {count} agents", sooner, 1.0, is_least=False),
        ]  # fmt: skip
    return tuple(limits)


def _row(
    turns: Sequence[Turn], of: Mapping[str, Sequence[Turn]], stories: Sequence[Story]
) -> dict[str, float]:
    same = [a.text == b.text for a, b in zip(turns, of["none"], strict=True)]
    right = [story.values[-1] in t.text for t, story in zip(turns, stories, strict=True)]
    return {
        "first_token_s": statistics.median(turn.first_s for turn in turns),
        "cached_share": _hits(turns),
        "as_if_computed": sum(same) / len(same),
        "right": sum(right) / len(right),
    }


def _hits(turns: Sequence[Turn]) -> float:
    return sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns)


def _compared(count: int, turns: Mapping[str, Sequence[Turn]]) -> dict[str, float]:
    first = {arm: statistics.median(t.first_s for t in turns[arm]) for arm in ARMS}
    return {
        f"{count}.hits_more": _hits(turns["splice"]) - _hits(turns["prefix"]),
        f"{count}.first_by_prefix": first["splice"] / first["prefix"],
        f"{count}.first_by_none": first["splice"] / first["none"],
    }


# --- the conversations -----------------------------------------------------------------------


def _story(rng: random.Random, number: int, notes: int) -> Story:
    messages, questions, values = [], [], []
    for at in range(MESSAGES):
        value = " ".join(rng.sample(VALUES, 4))
        question = f"The code {number * MESSAGES + at} of the {rng.choice(THINGS)} is"
        lines = [_note(rng) for _ in range(notes)]
        lines.insert(rng.randrange(len(lines)), f"{question} {value}.")
        messages.append(" ".join(lines))
        questions.append(question)
        values.append(value)
    return Story(tuple(messages), tuple(questions), tuple(values))


def _note(rng: random.Random) -> str:
    things = rng.sample(THINGS, 5)
    opening = rng.choice(OPENINGS).format(*things[:3])
    return f"{opening} {rng.choice(CLOSINGS).format(*things[3:])}"


def _history(texts: Sequence[str], question: str) -> tuple[Message, ...]:
    """Return a conversation in which every text except the last question is only acknowledged."""
    messages = [Message(MessageRole.SYSTEM, ("You remember what you are told.",))]
    for text in texts:
        messages += [
            Message(MessageRole.USER, (text,)),
            Message(MessageRole.ASSISTANT, ("Noted.",)),
        ]
    return (*messages, Message(MessageRole.USER, (question,)))


def _play(service: NodeService, arm: str, stories: Sequence[Story]) -> list[Turn]:
    """Send all stories, clear a message of each, and ask for a fact behind it."""
    say(f"{len(stories)} agents, {arm}")
    prompts = [_history(story.messages, story.questions[0]) for story in stories]
    if not arm.startswith("none"):
        _ask_all(service, arm, prompts, EditMode.FORGET)
    cleared = [
        tuple("[cleared]" if at == CLEARED else text for at, text in enumerate(story.messages))
        for story in stories
    ]
    edited = [
        _history(texts, story.questions[-1]) for texts, story in zip(cleared, stories, strict=True)
    ]
    mode = EditMode.AMORTIZE if arm.startswith("splice") else EditMode.FORGET
    return _ask_all(service, arm, edited, mode)


def _ask_all(
    service: NodeService, arm: str, prompts: Sequence[tuple[Message, ...]], mode: EditMode
) -> list[Turn]:
    async def together() -> list[Turn]:
        answers = (
            _ask(service, arm, number, prompt, mode) for number, prompt in enumerate(prompts)
        )
        return list(await asyncio.gather(*answers))

    work = together()
    return asyncio.run_coroutine_threadsafe(work, service._loop).result()  # noqa: SLF001


async def _ask(
    service: NodeService, arm: str, number: int, prompt: tuple[Message, ...], mode: EditMode
) -> Turn:
    # Each arm is its own tenant, without the others' caches.
    request = GenerateRequest(
        OperationId(f"benchmark-{next(_operations)}"),
        TenantId(arm),
        Identity(IdentityKind.AGENT, AgentId(f"agent-{number}")),
        Sampling(max_tokens=ANSWER_TOKENS),
        messages=prompt,
        edits=mode,
    )
    began_s, first_s, texts = time.perf_counter(), 0.0, []
    prompt_tokens = cached_tokens = 0
    async for event in service.node.turns.serve(request):
        if isinstance(event, Admitted):
            prompt_tokens, cached_tokens = event.prompt_tokens, event.cached_tokens
        elif isinstance(event, Delta):
            first_s = first_s or time.perf_counter() - began_s
            texts.append(event.text)
    return Turn(first_s, prompt_tokens, cached_tokens, "".join(texts))


def _service(folder: Path, model: str) -> NodeService:
    settings = NodeSettings(durability="none")
    name, key = NodeName("edit"), bytes(range(32))
    return NodeService(NodeConfig(name, folder / "data", model, key, settings, "127.0.0.1", 1))


# --- the cost of an edit ---------------------------------------------------------------------


def _cost_of_moving(model: Geometry, tokens_count: int, rounds: int) -> tuple[float, float]:
    """Return the seconds of moving `tokens_count` tokens in memory, and of computing them."""
    say(f"an edit in front of {tokens_count:,} tokens")
    engine = build_engine(build_model(model))
    repeated = pattern(model.vocabulary)
    [cache] = resident_caches(engine, repeated, [tokens_count + CHUNK], CHUNK)
    moves_s = []
    for number in range(rounds):
        by = 8 if number % 2 else -8
        end = cache.tokens_count
        began_s = time.perf_counter()
        cache.rearrange([Move(0, CHUNK, 0), Move(CHUNK + max(0, -by), end, CHUNK + max(0, by))])
        cache.settle()
        moves_s.append(time.perf_counter() - began_s)
        if cache.ahead:
            engine.prefill(cache, repeated[: cache.ahead[0][0] - cache.tokens_count])
    chunks = []
    for _ in range(rounds):
        cache.rewind(tokens_count // 2)  # at the tokens' average position
        began_s = time.perf_counter()
        engine.prefill(cache, (repeated * (CHUNK // len(repeated) + 1))[:CHUNK])
        chunks.append(time.perf_counter() - began_s)
    prefill_s = statistics.median(chunks) * tokens_count / CHUNK
    return statistics.median(moves_s), prefill_s
