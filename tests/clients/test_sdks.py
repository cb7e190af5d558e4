"""OpenAI's and Anthropic's own SDKs, in programs that use them as their documentation shows."""

import sys

import pytest

from tests.clients.judging import failures
from tests.clients.obedience import obeying
from tests.clients.programs import HERE, run_program
from tests.clients.shapes import FAMILIES
from tests.support.samples import sample

CORE = {
    "openai_sdk.py": (
        *("plain", "streamed", "tool", "tool_streamed", "structured", "structured_with_tool"),
        *("choices", "echo", "prompts", "continued"),
        *("error", "cancel", "warm", "responses_streamed", "responses_tool", "responses_warm"),
    ),
    "anthropic_sdk.py": (
        *("plain", "streamed", "tool_runner", "structured", "error", "cancel", "warm", "count"),
    ),
}


@pytest.fixture(scope="module", params=sample(FAMILIES, "a thought that the prompt opens"))
def rig(request, tmp_path_factory):
    with obeying(tmp_path_factory.mktemp("fabric"), request.param) as served:
        yield served


@pytest.mark.parametrize("program", CORE)
def test_sdk_program_uses_all_features(rig, program, tmp_path):
    since = len(rig.model.turns)
    command = [sys.executable, str(HERE / "python" / program), *CORE[program]]
    report = run_program(command, rig.fabric.url, rig.fabric.model_name, tmp_path)

    assert {*report.results, *report.errors} == set(CORE[program]), report.printed[-3_000:]
    found = failures(rig, report, since)
    assert not found, "\n".join(found)
