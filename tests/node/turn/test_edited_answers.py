"""Thoughts that a client never returns are kept after its edits."""

import pytest

from fabric.edit_mode import EditMode
from fabric.ids import AgentId
from tests.support.agent_traffic import TOOLS, Driver, Talk, corpus, drop_thought, words
from tests.support.samples import sample
from tests.support.scripted_answers import scripted
from tests.support.services import TENANT, running
from tests.support.template_shapes import SHAPES, write_shape

STEPS = 4


@pytest.mark.parametrize("has_restart", sample([False, True], True), ids=["hot", "read back"])
def test_early_edit_keeps_later_answers_with_their_thoughts(tmp_path, has_restart):
    shape = SHAPES["thought_opened"]
    model = write_shape(tmp_path / "model", shape, "full", corpus())
    with scripted() as script:
        with running(tmp_path, str(model)) as service:
            driver = Driver(service, shape, script, True, edits=EditMode.AMORTIZE)
            talk = Talk(driver, tools=TOOLS, echo=drop_thought)
            talk.ask(call=("read", {"path": "x"}))
            for step in range(STEPS):
                _append_result(talk, f"result {step} " + "of much " * 30)
                talk.answer(call=("read", {"path": f"x{step}"}))
            if not has_restart:
                _edit_and_continue(driver, talk)
        if has_restart:
            script.end = None
            with running(tmp_path, str(model)) as service:
                driver.service = service
                _edit_and_continue(driver, talk)


def _append_result(talk, text):
    (call,) = talk.messages[-1]["tool_calls"]
    talk.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


def _edit_and_continue(driver, talk):
    thought = words(300 + talk.step, 40)  # all have this one
    cleared = next(at for at, each in enumerate(talk.messages) if each["role"] == "tool")
    talk.messages[cleared] = {**talk.messages[cleared], "content": "[cleared]"}
    for turn in range(2):
        _append_result(talk, f"The last result of turn {turn}.")
        talk.answer(call=("read", {"path": f"y{turn}"}))
        agent = driver.service.node.resources.table.get((TENANT, AgentId("one")))
        assert agent.manifest.text.count(thought) == STEPS + turn + 2
        reuse = driver.turns[-1]
        # Only the cleared text, the newest result, and the marks around both are computed.
        assert reuse.prompt - reuse.cached < 80
        assert f"restored reasoning: {STEPS + 1 + turn}" in agent.last_match.reason
