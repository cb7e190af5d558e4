"""Clients of a real fabric that know the right answers."""

import contextlib
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.judges import Ack, Judges
from tests.cluster.ray_fabric import RayFabric

WORDS = (
    "otter", "lantern", "quartz", "violin", "amber", "falcon",
    "copper", "meadow", "silver", "maple", "thunder", "ivory",
)  # fmt: skip
ANSWER_S = 90.0  # on an idle machine during one fault; longer on a loaded one
TURNS_MAX = 12  # then a client starts a new conversation, so that prompts stay short
REQUEST_S = 120.0


def load_factor() -> float:
    """Return the factor by which the machine's load now slows everything down."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass
class Client:
    """Client of an agent that states a secret and asks for it repeatedly."""

    fabric: RayFabric
    judges: Judges
    random: random.Random
    number: int
    life: int = 0
    turns: int = 0
    secret: str = ""
    history: list[dict[str, str]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    erased: set[str] = field(default_factory=set)  # words that must no longer be stored anywhere
    erased_names: set[str] = field(default_factory=set)  # names that must not be listed

    @property
    def name(self) -> str:
        return f"Mira{self.number}x{self.life}"

    @property
    def marker(self) -> str:
        return f"zq{self.number:03}v{self.life:03}kx"

    def run(self, ended: threading.Event) -> None:
        """Take turns until `ended` is set."""
        while not ended.is_set():
            self.step()
            ended.wait(self.random.random() * load_factor())

    def step(self) -> None:
        """Take one random action."""
        if not self.secret:
            self._begin()
            return
        chance = self.random.random()
        if self.turns >= TURNS_MAX or chance < 0.04:
            self._erase()
        elif chance < 0.14:
            self._move()
        else:
            self.ask(hangs_up=chance < 0.24, streams=chance < 0.7)

    def _begin(self) -> None:
        self.secret = " ".join(self.random.sample(WORDS, 4))
        filler = " ".join(f"The note {i} of {self.marker} is number {i * 7}." for i in range(24))
        text = f"The vault code of {self.name} is {self.secret}. {filler}"
        if not self._ask_until_answered([{"role": "user", "content": text}], None):
            self.secret = ""

    def ask(self, *, hangs_up: bool = False, streams: bool = False) -> bool:
        """Ask for the secret until it is answered."""
        question = {"role": "user", "content": f"The vault code of {self.name} is"}
        return self._ask_until_answered([*self.history, question], self.secret, hangs_up, streams)

    def _ask_until_answered(self, messages, expected, hangs_up=False, streams=False) -> bool:
        began_s = time.monotonic()
        while time.monotonic() - began_s < ANSWER_S * load_factor():
            try:
                is_whole = self._attempt(messages, expected, hangs_up, streams)
            except (OSError, ValueError) as error:
                code = getattr(error, "code", None)
                self.failures[str(code or type(error).__name__)] += 1
                if isinstance(code, int) and code >= 500 and code not in (502, 503, 504, 507):
                    self.judges.fail("errors", f"{self.name}: status {code}")
            else:
                self.turns += is_whole
                return is_whole
            time.sleep(0.2 + self.random.random())
        self.judges.fail("answers", f"{self.name}: none for {ANSWER_S * load_factor():.0f} s")
        return False

    def _attempt(self, messages, expected, hangs_up, streams) -> bool:
        body = {"model": "recall", "messages": messages, "temperature": 0, "max_tokens": 10}
        body |= {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
        request = urllib.request.Request(
            f"{self.fabric.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "x-agent-id": self.name},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_S * load_factor()) as response:
            headers = response.headers
            if not streams:
                answer = json.loads(response.read())
                text = answer["choices"][0]["message"]["content"] or ""
                tokens = answer["usage"]["total_tokens"]
            else:
                text, tokens = self._read_stream(response, expected, hangs_up)
        if tokens is None:
            return False
        if expected is not None:
            self.judges.check_words(self.name, expected, text, is_whole=True)
        node, epoch = headers["x-macfabric-node"], int(headers["x-macfabric-epoch"])
        cached = int(headers["x-macfabric-cached-tokens"])
        ack = Ack(node, epoch, tokens, self.judges.now_s())
        self.judges.check_turn(self.name, ack, cached)
        self.history = [*messages, {"role": "assistant", "content": text}]
        return True

    def _read_stream(self, response, expected, hangs_up):
        text, tokens, is_done = "", None, False
        try:
            for line in response:
                data = line.decode().removeprefix("data: ").strip()
                if not data:
                    continue
                if data == "[DONE]":
                    is_done = True
                    break
                event = json.loads(data)
                if "error" in event:
                    message = event["error"].get("code", "error")
                    raise ValueError(message)
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                usage = event.get("usage")
                tokens = usage["total_tokens"] if usage else tokens
                if hangs_up and text:
                    return text, None
        finally:
            if expected is not None and not is_done:
                self.judges.check_words(self.name, expected, text, is_whole=False)
        if not is_done:
            message = "the stream ended early"
            raise ValueError(message)
        return text, tokens

    def _move(self) -> None:
        target = self.random.choice(self.fabric.names)
        with contextlib.suppress(OSError, ValueError):
            self.fabric.send("POST", f"/v1/agents/{self.name}/migrate", {"to": target})

    def _erase(self) -> None:
        """Erase the agent; repeat the request until it is acknowledged."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < ANSWER_S * load_factor():
            try:
                status, _ = self.fabric.send("DELETE", f"/v1/agents/{self.name}")
            except (OSError, ValueError):
                status = 0
            if status == 404 and not self.failures["erasures"]:
                self.judges.fail("erased", f"{self.name}: 404, and it had answered")
            if status in (200, 202, 404):
                self.erased.add(self.marker)
                self.erased_names.add(self.name)
                self.judges.forget(self.name)
                self.life, self.turns, self.secret, self.history = self.life + 1, 0, "", []
                self.failures["erasures"] = 0
                return
            self.failures["erasures"] += 1  # it may have been carried out and the answer lost
            time.sleep(0.5)
        self.judges.fail("answers", f"{self.name}: not erased for {ANSWER_S * load_factor():.0f} s")
