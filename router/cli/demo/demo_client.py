"""How the demo talks to the fabric: the official SDK for turns, plain HTTP for the rest."""

import http.client
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from router.cli.demo.demo_script import DemoAgent, Fact
from router.cli.endpoint import Endpoint
from router.cli.errors import CommandError
from router.cli.queries import rows_of

ANSWER_TOKENS_MAX = 48
TURN_TIMEOUT_S = 90.0  # a cold turn on a busy machine
PULSE_S = 0.1
NODE_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class DemoTurn:
    """One question to one agent, what came back, and how fast."""

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
    """One agent and everything said so far, as the client keeps it."""

    agent: DemoAgent
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[DemoTurn] = field(default_factory=list)


class Speaker:
    """Talks to agents through the official SDK, streaming."""

    def __init__(self, url: str, model: str) -> None:
        import openai

        self._errors = openai.OpenAIError
        self._model = model
        self._client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="loopback-needs-none", timeout=TURN_TIMEOUT_S
        )

    def ask(self, talk: Conversation, fact: Fact, state: str) -> DemoTurn:
        """Ask for one fact, measure, and keep what was said."""
        first = not talk.messages
        content = f"{talk.agent.briefing} {fact.question}" if first else fact.question
        talk.messages.append({"role": "user", "content": content})
        try:
            turn = self._stream(talk, fact, state)
        except self._errors as error:
            talk.messages.pop()
            turn = _failed(talk.agent.name, fact, state, f"{type(error).__name__}: {error}")
        else:
            talk.messages.append({"role": "assistant", "content": turn.answer})
        talk.turns.append(turn)
        return turn

    def _stream(self, talk: Conversation, fact: Fact, state: str) -> DemoTurn:
        messages: Any = talk.messages
        began_s = time.perf_counter()
        raw = self._client.chat.completions.with_raw_response.create(
            model=self._model,
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            temperature=0,
            max_tokens=ANSWER_TOKENS_MAX,
            stop=["."],
            extra_headers={"X-Agent-ID": talk.agent.name},
        )
        pieces: list[str] = []
        first_s = 0.0
        prompt_tokens = 0
        for chunk in raw.parse():
            if chunk.usage:
                prompt_tokens = chunk.usage.prompt_tokens
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                first_s = first_s or time.perf_counter()
                pieces.append(text)
        answer = "".join(pieces)
        headers = raw.headers
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


def nodes_by_name(endpoint: Endpoint) -> dict[str, dict[str, Any]]:
    """Return the nodes as the router sees them now."""
    return {str(node["name"]): node for node in rows_of(endpoint.get("/v1/nodes"))}


def wait_for_restart(
    endpoint: Endpoint, before: dict[str, dict[str, Any]], names: list[str], timeout_s: float
) -> float:
    """Wait until `names` serve again in a new life; return the seconds that took."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < timeout_s:
        now = nodes_by_name(endpoint)
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
    """Asks the endpoint every tenth of a second whether it serves, through everything."""

    def __init__(self, url: str) -> None:
        super().__init__(name="pulse", daemon=True)
        self._address = url.removeprefix("http://")
        self._done = threading.Event()
        self.asked = 0
        self.slowest_ms = 0.0
        self.failures: list[str] = []

    def run(self) -> None:
        while not self._done.wait(PULSE_S):
            began_s = time.perf_counter()
            try:
                connection = http.client.HTTPConnection(self._address, timeout=5.0)
                connection.request("GET", "/healthz")
                status = connection.getresponse().status
                connection.close()
            except OSError as error:
                self.failures.append(str(error))
            else:
                if status != http.client.OK:
                    self.failures.append(f"status {status}")
            self.asked += 1
            self.slowest_ms = max(self.slowest_ms, (time.perf_counter() - began_s) * 1000)

    def stop(self) -> None:
        self._done.set()
        self.join()
