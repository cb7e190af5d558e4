"""A rolling upgrade of a real `macfabric up` with three nodes, under load: no turn is lost.

Agents take turns, half of them streamed, while every node's process and the router's restart.
Each turn must succeed, and each except an agent's first must reuse its cache.
"""

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import openai
import pytest

from router.client.client import Fabric
from tests.support.fabric_process import ALICE, ROOT
from tests.support.tiny_models import LLAMA, write_model
from tests.support.up_fabric import running_up

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly]
NAMES = ("node-a", "node-b", "node-c")
AGENTS = 6
TURN_S = 300.0  # limit for hangs
UPGRADE_S = 1_500.0
STORY = "the cat sat on the mat and looked at the dog " * 30
TOKENS = 120


@dataclass
class Talker:
    """Client of one agent, which takes turns until it is stopped."""

    url: str
    name: str
    streams: bool
    turns: int = 0
    lost: list = field(default_factory=list)  # turns that failed, or reused no cache

    def __post_init__(self):
        self.messages = [{"role": "user", "content": f"{self.name}: {STORY}"}]
        # Every error is a failure here, so the client does not retry refused requests.
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=ALICE, max_retries=0, timeout=TURN_S
        )

    def run(self, done):
        while not done.is_set() and not self.lost:
            self.turn()

    def turn(self):
        try:
            text, cached = self._ask()
        except openai.OpenAIError as error:
            self.lost.append(f"turn {self.turns}: {error!r}")
            return
        if self.turns and not cached:
            self.lost.append(f"turn {self.turns} found no memory")
        self.turns += 1
        self.messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"and then, {self.turns}?"},
        ]

    def _ask(self):
        create = self.client.chat.completions.with_raw_response.create
        more = {"stream": True} if self.streams else {}
        answer = create(
            model="model",
            messages=self.messages,
            max_tokens=TOKENS,
            temperature=0,
            extra_headers={"x-agent-id": self.name},
            **more,
        )
        cached = int(answer.headers["x-macfabric-cached-tokens"])
        parsed = answer.parse()
        if not self.streams:
            return parsed.choices[0].message.content or "", cached
        parts, reason = [], None
        for chunk in parsed:
            for choice in chunk.choices:
                parts.append(choice.delta.content or "")
                reason = choice.finish_reason or reason
        if reason is None:
            self.lost.append(f"turn {self.turns}: its stream broke off")
        return "".join(parts), cached


def processes(fabric):
    rows = {row["name"]: (row["pid"], row["incarnation"]) for row in fabric.nodes()}
    return rows | {"router": fabric.router()["process"]}


def upgrade(up, *options):
    argv = [sys.executable, "-m", "router.cli.main", "upgrade", "--data", str(up.data), "--json"]
    done = subprocess.run(
        [*argv, *options],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=UPGRADE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["results"]


def test_rolling_upgrade_under_load_loses_no_turn_and_no_memory(tmp_path):
    model = str(write_model(tmp_path / "model", LLAMA))
    with running_up(tmp_path, model, router={"queue_max": 64}, names=NAMES) as up:
        fabric = Fabric(up.url, None, (up.data / "operator.key").read_text().strip(), 60.0)
        talkers = [Talker(up.url, f"agent-{n}", streams=n % 2 == 0) for n in range(AGENTS)]
        for each in talkers:
            each.turn()
        done = threading.Event()
        threads = [threading.Thread(target=each.run, args=(done,)) for each in talkers]
        before = processes(fabric)
        for each in threads:
            each.start()
        try:
            results = upgrade(up, "--force", "--wait", "120")
        finally:
            done.set()
            for each in threads:
                each.join(TURN_S)
        after = processes(fabric)
        for each in talkers:
            each.turn()
        states = {row["name"]: row["state"] for row in fabric.nodes()}

    assert [each.lost for each in talkers] == [[]] * AGENTS
    assert [row["result"] for row in results] == ["upgraded"] * 4
    assert all(after[name] != before[name] for name in before), "a process did not restart"
    assert set(states.values()) == {"ready"}
    assert all(each.turns > 3 for each in talkers), "turns paused"
