"""Client of the demo: measured turns, restarts that it waits for, a constant health check."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from router.cli.demo.demo_script import DemoAgent, Fact
from router.cli.errors import CommandError
from router.client.client import Fabric
from router.client.http_api import ClientError

ANSWER_TOKENS_MAX = 48
TURN_TIMEOUT_S = 90.0  # a cold turn on a busy machine
PULSE_S = 0.1
PULSE_TIMEOUT_S = 5.0
CHAT = "/v1/chat/completions"
NODE_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class DemoTurn:
    """One question to one agent, its answer and its figures."""

    agent: str
    state: str
    question: str
    expected: str
    answer: str
    right: bool
    first_token_ms: float
    node: str
    cache: str
    match: str
    cached_tokens: int
    prompt_tokens: int
    problem: str = ""


@dataclass(slots=True)
class Conversation:
    """One agent and its messages, as the client keeps them."""

    agent: DemoAgent
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[DemoTurn] = field(default_factory=list)


class Speaker:
    """Client that sends an agent's turns and measures the streamed answers."""

    def __init__(self, fabric: Fabric, model: str) -> None:
        self._fabric = fabric
        self._model = model

    def ask(self, talk: Conversation, fact: Fact, state: str) -> DemoTurn:
        """Ask for one fact, measure the answer, and append both to the conversation."""
        first = not talk.messages
        content = f"{talk.agent.briefing} {fact.question}" if first else fact.question
        talk.messages.append({"role": "user", "content": content})
        try:
            turn = self._stream(talk, fact, state)
        except ClientError as error:
            talk.messages.pop()
            turn = _failed(talk.agent.name, fact, state, f"{type(error).__name__}: {error}")
        else:
            talk.messages.append({"role": "assistant", "content": turn.answer})
        talk.turns.append(turn)
        return turn

    def _stream(self, talk: Conversation, fact: Fact, state: str) -> DemoTurn:
        body = {
            "model": self._model,
            "messages": talk.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS_MAX,
            "stop": ["."],
        }
        began_s = time.perf_counter()
        pieces: list[str] = []
        first_s = 0.0
        prompt_tokens = 0
        agent = {"x-agent-id": talk.agent.name}
        with self._fabric.stream("POST", CHAT, body, agent, TURN_TIMEOUT_S) as chunks:
            for chunk in (event.data for event in chunks):
                if error := chunk.get("error"):
                    raise ClientError(error.get("message"))
                prompt_tokens = (chunk.get("usage") or {}).get("prompt_tokens") or prompt_tokens
                choices = chunk.get("choices")
                if text := choices[0]["delta"].get("content") if choices else None:
                    first_s = first_s or time.perf_counter()
                    pieces.append(text)
            headers = chunks.headers
        answer = "".join(pieces)
        return DemoTurn(
            agent=talk.agent.name,
            state=state,
            question=fact.question,
            expected=fact.value,
            answer=answer,
            right=answer.strip() == fact.value,
            first_token_ms=round(((first_s or time.perf_counter()) - began_s) * 1000, 1),
            node=headers.get("x-macfabric-node", ""),
            cache=headers.get("x-macfabric-cache", ""),
            match=headers.get("x-macfabric-match", ""),
            cached_tokens=int(headers.get("x-macfabric-cached-tokens", "0")),
            prompt_tokens=prompt_tokens,
        )


def _failed(agent: str, fact: Fact, state: str, problem: str) -> DemoTurn:
    return DemoTurn(
        agent=agent,
        state=state,
        question=fact.question,
        expected=fact.value,
        answer="",
        right=False,
        first_token_ms=0.0,
        node="",
        cache="",
        match="",
        cached_tokens=0,
        prompt_tokens=0,
        problem=problem,
    )


def nodes_by_name(fabric: Fabric) -> dict[str, dict[str, Any]]:
    """Return the nodes that the router lists now."""
    return {str(node["name"]): node for node in fabric.nodes()}


def wait_for_restart(
    fabric: Fabric, before: dict[str, dict[str, Any]], names: list[str], timeout_s: float
) -> float:
    """Wait until restarted nodes serve again; return the seconds that took."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < timeout_s:
        now = nodes_by_name(fabric)
        back = [
            name
            for name in names
            if now.get(name, {}).get("state") == "ready"
            and now[name].get("incarnation") != before[name].get("incarnation")
        ]
        if len(back) == len(names):
            return time.monotonic() - began_s
        time.sleep(NODE_POLL_S)
    message = f"{', '.join(names)} did not come back within {timeout_s:g} s"
    raise CommandError(message)


class Pulse(threading.Thread):
    """Thread that checks ten times a second whether the fabric serves."""

    def __init__(self, url: str) -> None:
        super().__init__(name="pulse", daemon=True)
        self._fabric = Fabric(url, timeout_s=PULSE_TIMEOUT_S)
        self._done = threading.Event()
        self.asked = 0
        self.slowest_ms = 0.0
        self.failures: list[str] = []

    def run(self) -> None:
        while not self._done.wait(PULSE_S):
            began_s = time.perf_counter()
            try:
                self._fabric.get("/healthz")
            except ClientError as error:
                self.failures.append(str(error))
            self.asked += 1
            self.slowest_ms = max(self.slowest_ms, (time.perf_counter() - began_s) * 1000)

    def stop(self) -> None:
        self._done.set()
        self.join()
