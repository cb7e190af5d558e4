"""Coding agents as people run them, headless, started by `macfabric launch` on a real fabric.

They come from npm's registry (half a gigabyte), so this runs in `make test-all` only, and is
skipped where they cannot be had.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.installed import npm_folder
from tests.clients.judging import becomes_free
from tests.clients.obedience import ENDLESS, GREETING, SHELL, obeying

pytestmark = [pytest.mark.nightly, pytest.mark.slow]
RUN_S = 900
REUSED_MIN = 0.8  # of the first prompt of a second session, with the same tools and instructions


@dataclass(frozen=True)
class CodingAgent:
    """How people run it without a terminal; the question comes last."""

    group: str
    client: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return self.group


AGENTS = [
    CodingAgent("claude-code", "claude", ("--allowedTools", "Bash", "-p")),
    CodingAgent(
        "codex",
        "codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
    ),
    CodingAgent("opencode", "opencode", ("run",)),
    CodingAgent("qwen-code", "qwen", ("--yolo", "-p")),
]


@pytest.fixture(scope="module")
def on(tmp_path_factory):
    with obeying(tmp_path_factory.mktemp("fabric")) as made:
        yield made


@dataclass(frozen=True)
class Home:
    """Where one user of a coding agent works."""

    on: object
    agent: CodingAgent
    folder: object

    @contextmanager
    def started(self, question):
        """Start it as `macfabric launch` does, in a folder and a home of its own."""
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        programs = npm_folder(self.agent.group) / "node_modules" / ".bin"
        command = [sys.executable, "-m", "router.cli.main", "launch", self.agent.client]
        command += ["--url", self.on.fabric.url, "--", *self.agent.arguments, question]
        process = subprocess.Popen(
            command,
            cwd=work,
            env={
                "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
                "HOME": str(self.folder),
                "PYTHONPATH": str(Path.cwd()),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def ask(self, question):
        with self.started(question) as process:
            said, _ = process.communicate(timeout=RUN_S)
        assert process.returncode == 0, said.decode()[-2_000:]
        return said.decode()


@pytest.fixture(params=AGENTS, ids=str)
def home(request, on, tmp_path):
    return Home(on, request.param, tmp_path)


def test_it_connects_calls_a_tool_and_its_next_session_is_warm(on, home):
    assert "It says: " in home.ask(SHELL)
    assert (home.folder / "work" / "said").read_text() == "fabric-42\n"
    first = len(on.model.turns)
    assert GREETING in home.ask("Say hello, please.")

    longest = max(on.model.turns[first:], key=lambda turn: turn.prompt_tokens)
    assert longest.cached_tokens > REUSED_MIN * longest.prompt_tokens


def test_who_stops_it_frees_the_node(on, home):
    before = len(on.model.turns)
    with home.started(ENDLESS) as process:
        end_s = time.monotonic() + RUN_S
        while not any(len(t.sequence.answer_ids) > 50 for t in on.model.turns[before:]):
            assert process.poll() is None, process.communicate()[0].decode()[-2_000:]
            assert time.monotonic() < end_s, "it asked nothing"
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(RUN_S)
    assert becomes_free(on)
    assert any(turn.sequence.cancelled.is_set() for turn in on.model.turns[before:])
