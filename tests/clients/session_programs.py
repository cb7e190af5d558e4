"""Coding agents without a terminal: one conversation, continued by one process after another."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.installed import npm_folder, python_of

RUN_S = 300
MODEL = "scripted"


@dataclass(frozen=True)
class CodingAgent:
    """Command of a coding agent without a terminal; the question comes last."""

    group: str
    client: str
    arguments: tuple[str, ...]
    continuing: tuple[str, ...]
    question: tuple[str, ...] = ()  # before the question
    attaching: tuple[str, ...] = ()  # before a picture's path, where no tool reads it
    hosted: str | None = None  # type of the hosted search tool that it offers
    files: Mapping[str, Any] = field(default_factory=dict)  # its configuration, below its home
    rewrites: Mapping[str, str] = field(default_factory=dict)  # why phases are not warm
    is_python: bool = False

    def __str__(self) -> str:
        return self.group

    @property
    def has_tools(self) -> bool:
        """Whether it lets the model call tools."""
        return not self.attaching

    @property
    def programs(self) -> Path:
        """Folder of its programs, installed if necessary."""
        if self.is_python:
            return python_of(self.group).parent
        return npm_folder(self.group) / "node_modules" / ".bin"

    @contextmanager
    def home(self, url: str, folder: Path) -> Iterator["AgentHome"]:
        """Install the agent, and create its home and working folder."""
        agent_home = AgentHome(self, url, folder, folder / "work")
        agent_home.work.mkdir(exist_ok=True)
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content))
        yield agent_home


@dataclass
class AgentHome:
    """Home and working folder of one user of a coding agent, with one conversation."""

    agent: CodingAgent
    url: str
    folder: Path
    work: Path
    has_begun: bool = False

    def ask(self, question: str, picture: Path | None = None) -> str:
        """Ask in a new process, which must succeed; return its output."""
        with self._started(question, picture) as process:
            printed, _ = process.communicate(timeout=RUN_S)
        self.has_begun = True
        assert process.returncode == 0, printed.decode(errors="replace")[-2_000:]
        return printed.decode(errors="replace")

    def interrupt(
        self, question: str, is_answered: Callable[[], bool], by: signal.Signals = signal.SIGINT
    ) -> None:
        """Ask, and stop the process in the middle of the answer, as Control-C does."""
        with self._started(question, None) as process:
            end_s = time.monotonic() + RUN_S
            while not is_answered():
                assert process.poll() is None, process.communicate()[0].decode()[-2_000:]
                assert time.monotonic() < end_s, "no request reached the fabric"
                time.sleep(0.05)
            os.killpg(process.pid, by)
            process.communicate(timeout=RUN_S)

    @contextmanager
    def _started(self, question: str, picture: Path | None) -> Iterator[subprocess.Popen[bytes]]:
        agent = self.agent
        command = [sys.executable, "-m", "router.cli.main", "launch", agent.client]
        command += ["--url", self.url, "--", *agent.arguments]
        if picture is not None and agent.attaching:
            command += [*agent.attaching, str(picture)]
        command += [*(agent.continuing if self.has_begun else ()), *agent.question, question]
        process = subprocess.Popen(
            command,
            cwd=self.work,
            env={
                "PATH": os.pathsep.join([str(agent.programs), os.environ["PATH"]]),
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


_SEES = {"attachment": True, "modalities": {"input": ["text", "image"], "output": ["text"]}}
_AIDER = {"litellm_provider": "openai", "mode": "chat", "supports_vision": True}
_AIDER |= {"max_tokens": 20_480, "max_output_tokens": 20_480, "max_input_tokens": 81_920}
_MOVED = "aider repeats its instructions, and a file's picture, behind the conversation"
_REMINDED = "Qwen Code takes its reminder of the date out of the message before, a long text"

CODING_AGENTS = (
    CodingAgent(
        "claude-code",
        "claude",
        ("--allowedTools", "Bash,Read,WebSearch"),
        ("--continue",),
        ("-p",),
        hosted="web_search_",
    ),
    CodingAgent(
        "codex",
        "codex",
        (
            "exec",
            *("-c", 'web_search="live"'),
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
        ),
        ("resume", "--last"),
        hosted="web_search",
    ),
    CodingAgent(
        "opencode",
        "opencode",
        ("run",),
        ("--continue",),
        files={"work/opencode.json": {"provider": {"macfabric": {"models": {MODEL: _SEES}}}}},
    ),
    CodingAgent(
        "qwen-code",
        "qwen",
        ("--yolo",),
        ("--continue",),
        ("-p",),
        files={
            ".qwen/settings.json": {"model": {"generationConfig": {"modalities": {"image": True}}}}
        },
        rewrites={"last": _REMINDED},
    ),
    CodingAgent(
        "aider",
        "aider",
        (
            *("--model-metadata-file", "../metadata.json"),
            *("--yes-always", "--no-git", "--no-pretty", "--map-tokens", "0"),
            *("--no-check-update", "--no-show-release-notes", "--analytics-disable"),
        ),
        ("--restore-chat-history",),
        ("--message",),
        attaching=("--file",),
        files={"metadata.json": {f"openai/{MODEL}": _AIDER}},
        rewrites=dict.fromkeys(
            ("picture", "search", "interrupted", "resumed", "restarted", "last"), _MOVED
        ),
        is_python=True,
    ),
)
