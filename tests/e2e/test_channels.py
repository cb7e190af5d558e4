"""A small gpt-oss over HTTP: its history is accepted, and the second turn is warm."""

import json

import openai
import pytest

from tests.support.agent_traffic import TOOLS, corpus, words
from tests.support.architectures import ARCHITECTURES
from tests.support.chat_models import HARMONY, HARMONY_SPECIALS
from tests.support.local_fabric import local_fabric
from tests.support.samples import sample
from tests.support.scripted_answers import scripted
from tests.support.template_shapes import VOCABULARY, Shape, write_shape

WEIGHTS = {**ARCHITECTURES["gpt_oss"], "vocab_size": VOCABULARY}
SHAPE = Shape("harmony", HARMONY, HARMONY_SPECIALS, "<|return|>", str, "<|call|>")
THOUGHT = "<|channel|>analysis<|message|>the lantern.<|end|><|start|>assistant"
FINAL = f"{THOUGHT}<|channel|>final<|message|>a copper falcon."
CALL = (
    f"{THOUGHT} to=functions.read<|channel|>commentary json<|message|>"
    '{"path": "the cellar", "what": "the harbor"}'
)


class Talk:
    """Client that sends back its answers, with or without the thoughts."""

    def __init__(self, fabric, script, *, sends_thoughts):
        self._fabric, self._script, self._sends_thoughts = fabric, script, sends_thoughts
        self.messages = [{"role": "system", "content": words(1, 300)}]

    def ask(self, output, end, prompt):
        node = self._fabric.services["only"].node
        self._script.tokens.clear()
        self._script.tokens.extend(node.resources.tokenizer.encode(output).ids)
        (self._script.end,) = node.resources.tokenizer.encode(end).ids
        self.messages.append(prompt)
        answer = self._fabric.chat(self.messages, tools=TOOLS, max_tokens=400)
        message = answer.raw["choices"][0]["message"]
        sent = ["role", "content", "tool_calls", *["reasoning_content"] * self._sends_thoughts]
        self.messages.append({name: message[name] for name in sent if message.get(name)})
        return answer, message


@pytest.mark.slow
@pytest.mark.parametrize(
    "sends_thoughts", sample([True, False], True), ids=["thoughts", "no thoughts"]
)
def test_channels_are_parsed_and_next_turn_is_warm(tmp_path, sends_thoughts):
    model = write_shape(tmp_path / "model", SHAPE, WEIGHTS, corpus())
    with scripted() as script, local_fabric(tmp_path, str(model), "only") as fabric:
        talk = Talk(fabric, script, sends_thoughts=sends_thoughts)
        first, called = talk.ask(CALL, "<|call|>", {"role": "user", "content": words(2, 40)})
        (call,) = called["tool_calls"]
        assert first.finish_reason == "tool_calls"
        assert called["reasoning_content"] == "the lantern."
        assert json.loads(call["function"]["arguments"])["path"] == "the cellar"

        if not sends_thoughts:  # the node restores them from the agent's record
            script.end = None  # a starting node tests itself
            fabric.restart("only")
        result = {"role": "tool", "tool_call_id": call["id"], "content": words(3, 40)}
        second, message = talk.ask(FINAL, "<|return|>", result)
        assert (message["content"], message["reasoning_content"]) == (
            "a copper falcon.",
            "the lantern.",
        )
        assert second.cached_tokens > first.prompt_tokens + 30  # including the call

        third, _ = talk.ask(FINAL, "<|return|>", {"role": "user", "content": words(4, 40)})
        assert third.cached_tokens >= second.prompt_tokens - 2
        assert third.agent == second.agent == first.agent
        script.end = None


def test_template_error_is_reported_when_control_marks_are_enabled(tmp_path):
    """By default markup is plain text, which no template refuses."""
    model = write_shape(tmp_path / "model", SHAPE, WEIGHTS, corpus())
    with local_fabric(tmp_path, str(model), "only") as fabric:
        history = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": FINAL}]
        fabric.chat([*history, history[0]])
        marks = {"chat_template_kwargs": {"control_marks": True}}
        with pytest.raises(openai.BadRequestError, match="channel"):
            fabric.chat([*history, history[0]], extra_body=marks)
