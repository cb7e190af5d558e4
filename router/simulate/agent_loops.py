"""Workloads of agents that work in loops: code, long histories, rounds of chat, tools.

Sizes of published workloads are divided by four, as contexts on a Mac are; docs/simulate.md names
the source of each.
"""

from collections.abc import Iterable
from random import Random
from typing import Final

from router.simulate.content import Segment, segment
from router.simulate.sessions import Ask, Script
from router.simulate.workload import SessionSeed, Workload, lognormal

_SYSTEM: Final = 0x737973  # kinds of segments
_PROJECT: Final = 0x70726F
_MESSAGE: Final = 0x6D7367

AGENTIC_SHARE: Final = 0.7  # of turns that follow a tool instead of a person
CONTEXT_TOKENS: Final = 41_750
SYSTEM_TOKENS: Final = 8_000


def _message(random: Random, tokens: int) -> tuple[tuple[Segment, int], ...]:
    return ((segment(_MESSAGE, random.getrandbits(60)), tokens),)


def agentic_code(seed: SessionSeed) -> Iterable[Script]:
    """W1: a long shared system prompt, a project, and turns that grow until a restart."""
    return (_agentic_code(seed.random),)


def _agentic_code(random: Random) -> Script:
    system = (segment(_SYSTEM, 1), SYSTEM_TOKENS)
    project_tokens = lognormal(random, 3_750, 1_250, 7_500)
    project = (segment(_PROJECT, random.getrandbits(60)), project_tokens)
    context = 0
    for turn in range(random.randint(6, 18)):
        is_agentic = random.random() < AGENTIC_SHARE
        delay_s = random.uniform(1, 5) if is_agentic else random.uniform(10, 60)
        tokens = lognormal(random, 1_500, 1_100, 2_500)
        answer = lognormal(random, 250, 180, 375)
        probability = 0.01 * (1 + 0.5 * context / CONTEXT_TOKENS)
        restarts = random.random() < probability or context + tokens > CONTEXT_TOKENS
        is_fresh = turn == 0 or restarts
        parts = _message(random, tokens)
        if is_fresh:
            parts = (system, project, *parts)
            context = SYSTEM_TOKENS + project_tokens
        context += tokens + answer
        yield Ask(parts, answer, 0.0 if turn == 0 else delay_s, is_fresh)


def long_histories(seed: SessionSeed) -> Iterable[Script]:
    """W3: a common beginning, a long first message, then many steps of equal size."""
    return (_long_history(seed.random),)


def _long_history(random: Random) -> Script:
    system = (segment(_SYSTEM, 3), 5_000)
    for turn in range(30):
        first = (system, *_message(random, 2_500)) if turn == 0 else ()
        delay_s = 0.0 if turn == 0 else random.uniform(1, 8)
        yield Ask((*first, *_message(random, 512)), 225, delay_s)


def chat_rounds(seed: SessionSeed) -> Iterable[Script]:
    """W4: a long history from before, then short questions of a person."""
    return (_chat(seed.random),)


def _chat(random: Random) -> Script:
    system = (segment(_SYSTEM, 4), 500)
    for turn in range(10):
        history = (system, *_message(random, 2_500)) if turn == 0 else ()
        delay_s = 0.0 if turn == 0 else random.uniform(5, 30)
        yield Ask((*history, *_message(random, 50)), 100, delay_s)


def tool_agents(seed: SessionSeed) -> Iterable[Script]:
    """W6: short agents whose turns wait for one to four tools at once; some tools are retried."""
    return (_tool_agent(seed.random),)


def _tool_agent(random: Random) -> Script:
    system = (segment(_SYSTEM, 6), 512)
    yield Ask((system, *_message(random, 256)), 128)
    for _ in range(random.randint(1, 4)):
        tools = random.randint(1, 4)
        times_s = [random.uniform(0.1, 1.5) for _ in range(tools)]
        times_s = [2 * each if random.random() < 0.1 else each for each in times_s]
        think_s = random.uniform(0.25, 3.0)
        yield Ask(_message(random, 256 + 128 * tools), 128, max(times_s) + think_s)


AGENT_LOOPS: Final = (
    Workload("W1", "agentic code: growing contexts with restarts", agentic_code, 240),
    Workload("W3", "codex-like: long histories in equal steps", long_histories, 120),
    Workload("W4", "multi-round chat over a long history", chat_rounds, 240),
    Workload("W6", "short agents that wait for parallel tools", tool_agents, 800),
)
