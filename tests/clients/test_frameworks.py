"""SDKs and agent frameworks, installed from their registries, against one fabric."""

from dataclasses import dataclass, field

import pytest

from tests.clients.installed import npm_folder, python_of
from tests.clients.judging import failures
from tests.clients.obedience import obeying
from tests.clients.programs import HERE, run_program

pytestmark = [pytest.mark.nightly, pytest.mark.slow]
USUAL = frozenset({"plain", "streamed", "tool", "structured", "error", "cancel", "warm"})


@dataclass(frozen=True)
class Program:
    """A client, the program that uses it, and the features that the client lacks."""

    group: str
    file: str
    lacks: frozenset[str] = frozenset()
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.group, *self.environment.values()])


def _ai_sdk(provider: str) -> Program:
    return Program("ai-sdk", "ai_sdk.mjs", environment={"PROVIDER": provider})


PROGRAMS = [
    Program("openai", "openai_sdk.py"),
    Program("anthropic", "anthropic_sdk.py"),
    Program("openai-js", "openai_sdk.mjs"),
    Program("anthropic-js", "anthropic_sdk.mjs"),
    _ai_sdk("openai"),
    _ai_sdk("compatible"),
    _ai_sdk("anthropic"),
    Program("langchain", "langchain_agents.py"),
    Program("openai-agents", "openai_agents.py"),
    Program("pydantic-ai", "pydantic_agents.py"),
    Program("instructor", "instructor_models.py", USUAL - {"structured", "error"}),
    Program("smolagents", "smol_agents.py", frozenset({"structured"})),
    Program("litellm", "litellm_calls.py"),
    Program("llama-index", "llama_index_llms.py"),
    Program("dspy", "dspy_programs.py", frozenset({"streamed", "tool", "cancel"})),
    Program("crewai", "crews.py", frozenset({"streamed", "cancel"})),
    Program("autogen", "autogen_agents.py"),
    Program("agent-framework", "framework_agents.py"),
    Program("llm", "llm_cli.py", frozenset({"cancel"})),
]


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    with obeying(tmp_path_factory.mktemp("fabric")) as served:
        yield served


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program_uses_all_features(rig, program, tmp_path):
    command, environment = _command(program)
    since = len(rig.model.turns)
    report = run_program(command, rig.fabric.url, rig.fabric.model_name, tmp_path, **environment)

    tried = {*report.results, *report.errors}
    assert tried >= USUAL - program.lacks, report.printed[-3_000:]
    found = failures(rig, report, since)
    assert not found, "\n".join(found)


def _command(program: Program) -> tuple[list[str], dict[str, str]]:
    if program.file.endswith(".py"):
        return [str(python_of(program.group)), str(HERE / "python" / program.file)], {}
    folder = npm_folder(program.group)
    node = folder / "node_modules" / ".bin" / "node"  # of the version that the packages require
    script = str(HERE / "javascript" / program.file)
    return [str(node), script], {"CLIENT_FOLDER": str(folder), **program.environment}
