"""Coding agents as people run them, headless, against a scripted model behind the real router.

They come from npm's registry (half a gigabyte), so this runs in `make test-all` only, and is
skipped where they cannot be had.
"""

import asyncio
import json
import os
import shutil
import subprocess

import pytest

from fabric.settings import RouterSettings
from fabric.turn.generation import (
    Delta,
    Finished,
    FinishReason,
    MatchKind,
    ToolCall,
    ToolCalls,
)
from fabric.turn.messages import MessageRole
from tests.router.fake_node import MODEL, FakeNode
from tests.router.rig import rig

pytestmark = [pytest.mark.anyio, pytest.mark.nightly, pytest.mark.slow]
INSTALL_S, RUN_S = 600, 180
COMMAND = "echo fabric-$((40+2))"
SHELLS = {"Bash": {"command": COMMAND, "description": "says"}, "exec_command": {"cmd": COMMAND}}
PROVIDER = '{name="fabric",base_url="URL/v1",wire_api="responses",env_key="OPENAI_API_KEY"}'
AGENTS = {
    "@anthropic-ai/claude-code@2.1.197": ["claude", "-p", "Run it", "--allowedTools", "Bash"],
    "@openai/codex@0.169.0": [
        *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("-c", "model=gpt-5", "-c", "model_provider=fabric"),
        *("-c", f"model_providers.fabric={PROVIDER}", "Run it"),
    ],
}


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Scripted(FakeNode):
    """Thinks, calls a shell, and then says what that said."""

    def _answer(self, asked, text):
        results = [m for m in asked.messages if m.role is MessageRole.TOOL]
        if results:
            said = "".join(results[-1].texts)
            return [Delta(0, "It says: "), Delta(1, said), Finished(FinishReason.STOP, 2)]
        names = [tool["function"]["name"] for tool in asked.tools or []]
        shell = next((name for name in names if name in SHELLS), None)
        if shell is None:
            return [Delta(0, "Well."), Finished(FinishReason.STOP, 1)]
        call = ToolCall(shell, json.dumps(SHELLS[shell]))
        thought = Delta(0, "A shell knows.", reasoning=True)
        return [
            thought,
            Delta(1, "Let me run it."),
            ToolCalls((call,)),
            Finished(FinishReason.TOOL_CALLS, 9),
        ]


@pytest.mark.parametrize("package", AGENTS)
async def test_it_connects_calls_a_tool_and_goes_on_warm(package, tmp_path):
    program, *arguments = AGENTS[package]
    folder = await asyncio.to_thread(installed, package, tmp_path / "npm")
    settings = RouterSettings(model_aliases={"*": MODEL})
    async with rig(nodes=[Scripted("node-a")], settings=settings) as made:
        said = await run(
            [folder / program, *(each.replace("URL", made.url) for each in arguments)],
            tmp_path,
            {"ANTHROPIC_BASE_URL": made.url},
        )
        matches = [memory.last_match for memory in made["node-a"].memory.values()]

    assert "fabric-42" in said
    assert MatchKind.EXTEND in [match.kind for match in matches]


def installed(package, folder):
    """Install an agent program from the registry; skip the test where that does not go."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder.mkdir()
    install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), package]
    try:
        done = subprocess.run(install, capture_output=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the registry gave no {package} in {INSTALL_S} s")
    if done.returncode:
        pytest.skip(f"{package} cannot be had: {done.stderr.decode()[-200:]}")
    return folder / "node_modules" / ".bin"


async def run(command, folder, more):
    """Run it in a folder and home of its own; return what it printed."""
    work, home = folder / "work", folder / "home"
    for each in (work, home, home / ".codex"):
        each.mkdir()
    keys = {"ANTHROPIC_API_KEY": "any", "OPENAI_API_KEY": "any"}
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **keys, **quiet, **more},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(RUN_S):
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()[-2_000:]
    return said.decode()
