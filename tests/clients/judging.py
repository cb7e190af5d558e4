"""Expectations of each feature that a program reports, for every client."""

import json
import time
from collections.abc import Callable
from typing import Any

from fabric.turn.messages import MessageRole
from tests.clients.obedience import GREETING, Obeying
from tests.clients.programs import Report

CALLED = "It says: sunny in Paris"
HELLO, AGAIN = "Say hello.", "Say hello again."
WARM_MIN = 0.8  # of the second turn's prompt
FREE_S = 60.0


def failures(rig: Obeying, report: Report, since: int) -> list[str]:
    """List the failures seen by the program and in the fabric's turns meanwhile."""
    found = [f"{name}: {error}" for name, error in report.errors.items()]
    for name, result in report.results.items():
        if not is_right(name, result):
            found.append(f"{name}: {json.dumps(result)[:500]}")
    if not report.results:
        found.append(report.printed[-3_000:])
    turns = rig.model.turns[since:]
    found += ["a result came without its call" for turn in turns if _lacks_call(turn.request)]
    second = [turn for turn in turns if AGAIN in _last_text(turn.request)]
    if "warm" in report.results and not second:
        found.append("warm: there was no second turn")
    found += [
        f"second turn: {turn.cached_tokens} of {turn.prompt_tokens} tokens were reused"
        for turn in second
        if turn.cached_tokens < WARM_MIN * turn.prompt_tokens
    ]
    if "cancel" in report.results and not any(turn.sequence.cancelled.is_set() for turn in turns):
        found.append("cancel: no turn was cancelled")
    if not becomes_free(rig):
        found.append("a turn still runs")
    return found + rig.model.disobeyed


def is_right(name: str, result: Any) -> bool:
    """Return whether a program's result of one feature is right."""
    return all(fits(result) for kind, fits in FITS.items() if name.startswith(kind))


def _greets(result: Any) -> bool:
    return set([result] if isinstance(result, str) else result) == {GREETING}


def _reuses(result: Any) -> bool:  # None: the client does not report usage
    return result is None or result[1] > WARM_MIN * result[0]


FITS: dict[str, Callable[[Any], bool]] = {
    "plain": _greets,
    "streamed": lambda parts: "".join(parts) == GREETING,
    "responses_streamed": lambda parts: "".join(parts) == GREETING,
    "tool": lambda result: result in (CALLED, ["weather"], {"city": "Paris"}),
    "responses_tool": lambda result: result == CALLED,
    "handoff": lambda agent: agent == "weather",
    "structured": lambda result: result["city"] == "Paris",
    "responses_structured": lambda result: result["city"] == "Paris",
    "choices": lambda result: len(result) == 3 and len(set(result)) == 1,
    "echo": lambda result: result.startswith(HELLO) and len(result) > len(HELLO),
    "prompts": lambda result: [text.startswith(HELLO) for text in result] == [True, False],
    "continued": _greets,
    "several": lambda result: len(result) == 2 and _greets(result),
    "concurrent": lambda result: len(result) == 8 and _greets(result),
    "batch": lambda result: len(result) == 2 and _greets(result),
    "error": lambda words: "'nope' is not served here" in words,
    "too_long": lambda words: "context length" in words or "prompt is too long" in words,
    "warm": _reuses,
    "responses_warm": _reuses,
}


def _lacks_call(request: Any) -> bool:
    """Return whether a client left out the call that a tool's result answers."""
    roles = [message.role for message in request.messages or ()]
    return MessageRole.TOOL in roles and MessageRole.ASSISTANT not in roles


def _last_text(request: Any) -> str:
    return "".join(request.messages[-1].texts).strip() if request.messages else ""


def becomes_free(rig: Obeying) -> bool:
    """Wait until no agent is busy."""
    end_s = time.monotonic() + FREE_S
    while time.monotonic() < end_s:
        if not any(agent["busy"] for agent in rig.fabric.http.get("/v1/agents").json()["data"]):
            return True
        time.sleep(0.05)
    return False
