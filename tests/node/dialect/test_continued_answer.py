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


def begun(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("text", ["one, two,", "Sure: <b> \u00e9 {\n  1", "x"])
def test_a_prompt_ends_with_the_answer_that_is_begun(tmp_path, name, text):
    write_tokenizer(tmp_path, SHAPES[name], corpus())
    tokenizer = ChatTokenizer(load(tmp_path))
    messages = [USER, begun("One."), USER, begun(text)]
    made = tokenizer.rendered(messages, None, {}, continues=True).text
    theirs = tokenizer.wrapper.apply_chat_template(
        messages, tokenize=False, continue_final_message=True, add_generation_prompt=False
    )
    assert made == theirs
    assert made.endswith(text)
    closed = tokenizer.render(messages, None, {}, opens_answer=False)
    assert closed.startswith(made)


def test_white_space_at_its_end_stays(tmp_path):
    write_tokenizer(tmp_path, SHAPES["thought_opened"], corpus())
    tokenizer = ChatTokenizer(load(tmp_path))
    made = tokenizer.rendered([USER, begun("one,\n ")], None, {}, continues=True).text
    assert made.endswith("one,\n ")


def test_a_thought_that_is_begun_is_gone_on_with(tmp_path):
    write_tokenizer(tmp_path, SHAPES["thought_opened"], corpus())
    tokenizer = ChatTokenizer(load(tmp_path))
    messages = [USER, begun("", reasoning_content="Let me see")]
    made = tokenizer.rendered(messages, None, {}, continues=True)
    assert made.begun == "<think>\nLet me see"
    reader = tokenizer.reader(made.begun, (), None, "")
    assert reader.feed(", one").reasoning == ", one"
    assert reader.feed("</think>\n\nOne.").text == "One."


def test_a_template_that_leaves_it_out_is_refused():
    with pytest.raises(RejectedError) as caught:
        cut_at_mark("<|user|>Count.")
    assert caught.value.code == "template_refused"


def test_what_follows_is_shown_as_it_is():
    reader = MarkedReader(marked(thoughts="think"), ("stop",), None, "")
    reader.begin("<think>\n\n</think>\n\nThe capital stop is\n")
    shown = [reader.feed(text) for text in ("\n Paris", " <think> no", " st", "op it")]
    assert "".join(each.text for each in shown) == "\n Paris <think> no "
    assert not any(each.reasoning for each in shown)
    assert shown[-1].stopped_by == "stop"


def test_of_the_prompt_nothing_is_shown_nor_looked_through_for_stops():
    reader = HarmonyReader(("two three",), None, "")
    reader.begin("<|channel|>final<|message|>one two")
    shown = reader.feed(" three four")
    assert (shown.text, shown.stopped_by) == (" three four", None)
