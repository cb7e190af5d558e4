"""Continuing an answer ends the prompt as transformers' continue_final_message does."""

import pytest
from mlx_lm.tokenizer_utils import load

from fabric.errors import RejectedError
from node.dialect.harmony import HarmonyReader
from node.dialect.marked_reader import MarkedReader
from node.dialect.template_messages import cut_at_mark
from node.mlx.chat_tokenizer import ChatTokenizer
from tests.node.dialect.reading import marked
from tests.support.agent_traffic import corpus
from tests.support.template_shapes import SHAPES, write_tokenizer

SYSTEM = {"role": "system", "content": "You count."}
USER = {"role": "user", "content": "Count to four."}


def partial_answer(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("text", ["one, two,", "Sure: <b> \u00e9 {\n  1", "x"])
def test_prompt_ends_with_the_partial_answer(tmp_path, name, text):
    write_tokenizer(tmp_path, SHAPES[name], corpus())
    tokenizer = ChatTokenizer(load(tmp_path))
    messages = [USER, partial_answer("One."), USER, partial_answer(text)]
    rendered = tokenizer.rendered(messages, None, {}, continues=True).text
    theirs = tokenizer.wrapper.apply_chat_template(
        messages, tokenize=False, continue_final_message=True, add_generation_prompt=False
    )
    assert rendered == theirs
    assert rendered.endswith(text)
    closed = tokenizer.render(messages, None, {}, opens_answer=False)
    assert closed.startswith(rendered)


def test_trailing_white_space_of_partial_answer_is_kept(tmp_path):
    write_tokenizer(tmp_path, SHAPES["thought_opened"], corpus())
    tokenizer = ChatTokenizer(load(tmp_path))
    rendered = tokenizer.rendered([USER, partial_answer("one,\n ")], None, {}, continues=True).text
    assert rendered.endswith("one,\n ")


def test_partial_thought_is_continued(tmp_path):
    write_tokenizer(tmp_path, SHAPES["thought_opened"], corpus())
    tokenizer = ChatTokenizer(load(tmp_path))
    messages = [USER, partial_answer("", reasoning_content="Let me see")]
    rendered = tokenizer.rendered(messages, None, {}, continues=True)
    assert rendered.begun == "<think>\nLet me see"
    reader = tokenizer.reader(rendered.begun, (), None, "")
    assert reader.feed(", one").reasoning == ", one"
    assert reader.feed("</think>\n\nOne.").text == "One."


def test_template_dropping_the_partial_answer_is_refused():
    with pytest.raises(RejectedError) as caught:
        cut_at_mark("<|user|>Count.")
    assert caught.value.code == "template_refused"


def test_continuation_is_shown_verbatim():
    reader = MarkedReader(marked(thoughts="think"), ("stop",), None, "")
    reader.begin("<think>\n\n</think>\n\nThe capital stop is\n")
    shown = [reader.feed(text) for text in ("\n Paris", " <think> no", " st", "op it")]
    assert "".join(each.text for each in shown) == "\n Paris <think> no "
    assert not any(each.reasoning for each in shown)
    assert shown[-1].stopped_by == "stop"


def test_partial_answer_is_neither_shown_nor_searched_for_stops():
    reader = HarmonyReader(("two three",), None, "")
    reader.begin("<|channel|>final<|message|>one two")
    shown = reader.feed(" three four")
    assert (shown.text, shown.stopped_by) == (" three four", None)
