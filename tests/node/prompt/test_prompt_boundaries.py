"""Where a prompt's parts end, with any template and any user text."""

import pytest
from mlx_lm.tokenizer_utils import load

from fabric.ids import OperationId, TenantId
from fabric.turn.generation import GenerateRequest, Identity, IdentityKind, Sampling
from fabric.turn.messages import template_form
from fabric.turn.prompt_plan import EMPTY_TRANSCRIPT, plan_prompt
from node.limits import ANSWER_OPENINGS_MAX
from node.mlx.chat_tokenizer import ChatTokenizer
from node.prompt.prompt_boundaries import PromptBoundaries
from tests.support.agent_traffic import TOOLS, corpus, words
from tests.support.conversations import read_messages
from tests.support.template_shapes import SHAPES, write_tokenizer

SYSTEM = {"role": "system", "content": words(1, 300)}
USER = {"role": "user", "content": "Is <tool_call> or <think> or <|im_start|> a word?"}
CALL = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "Where?",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "x"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "It says nothing."}


def find_parts(tmp_path, name, messages, tools=None, landmarks=None):
    """Return a prompt's text in four parts, its marks, and their finder."""
    if landmarks is None:
        write_tokenizer(tmp_path, SHAPES[name], corpus())
        landmarks = PromptBoundaries(ChatTokenizer(load(tmp_path)))
    tokenizer, spoken = landmarks.tokenizer, read_messages(messages)
    request = GenerateRequest(
        OperationId("operation-1"),
        TenantId("t"),
        Identity(IdentityKind.CONTENT),
        Sampling(),
        spoken,
        tools=tools,
    )
    text = tokenizer.render([template_form(message) for message in spoken], tools, {})
    plan = plan_prompt(tokenizer, text, EMPTY_TRANSCRIPT, raw=False)
    marks = landmarks.find(request, plan, has_states=True)
    at = [plan.ends[count - 1] if count else 0 for count in (marks.head, marks.question)]
    opened = plan.ends[marks.conversation - 1] if marks.conversation else len(plan.text)
    parts = [plan.text[: at[0]], plan.text[: at[1]], plan.text[:opened], plan.text[opened:]]
    return [part.decode() for part in parts], marks, landmarks


OPENINGS = {
    "chatml": ("<|im_start|>assistant\n", False),
    "thought_opened": ("<|im_start|>assistant\n<think>\n", True),
    "thought_closed": ("<|im_start|>assistant\n<think>\n\n</think>\n\n", True),
    "role_tokens": ("<|assistant|><think>", True),
    "stripped_by_template": ("<|Assistant|><think>\n", True),
    "headers": ("<|head|>assistant<|/head|>\n\n", True),
    "folded_system": ("<start_of_turn>model\n", False),
    "head_at_last_question": ("", False),  # nothing follows the question's own end
    "no_tokens": ("", False),  # no token marks the end, so the text might continue
}


@pytest.mark.parametrize("name", OPENINGS)
def test_answer_opening_is_found_despite_marks_in_user_text(tmp_path, name):
    (_, _, _, opening), marks, landmarks = find_parts(tmp_path, name, [SYSTEM, USER])
    assert (opening, marks.opens_more) == OPENINGS[name]

    again = find_parts(tmp_path, name, [SYSTEM, USER, CALL, RESULT, USER], landmarks=landmarks)
    assert again[0][3] == opening


@pytest.mark.parametrize("name", ["thought_opened", "role_tokens"])
def test_head_ends_before_the_first_question(tmp_path, name):
    (head, prior, _, _), _, _ = find_parts(tmp_path, name, [SYSTEM, USER], TOOLS)
    assert head.rstrip().endswith(("user", "<|user|>"))
    assert '"list"' in head
    assert prior == ""


@pytest.mark.parametrize("name", ["thought_opened", "role_tokens"])
def test_last_question_is_found_within_a_tool_loop(tmp_path, name):
    (_, prior, conversation, _), _, _ = find_parts(
        tmp_path, name, [SYSTEM, USER, CALL, RESULT, CALL, RESULT], TOOLS
    )
    assert "a word?" in prior
    assert "I look" not in prior
    assert conversation.count("It says nothing.") == 2


@pytest.mark.parametrize("name", ["thought_opened", "folded_system"])
def test_branch_points_are_at_dates_and_the_last_question(tmp_path, name):
    dated = {**SYSTEM, "content": SYSTEM["content"] + "\nToday is Monday.\nBe brief."}
    answer = {"role": "assistant", "content": "Yes."}
    again = {"role": "user", "content": "And a mark?"}
    _, marks, landmarks = find_parts(tmp_path, name, [dated, USER, answer, again])
    tokenizer = landmarks.tokenizer
    text = tokenizer.render(
        [template_form(m) for m in read_messages([dated, USER, answer, again])], None, {}
    )
    ids = tokenizer.encode(text).ids
    ends = [tokenizer._tokenizer.decode(ids[:count])[-20:] for count in marks.branches]

    assert any(SYSTEM["content"].endswith(end.strip()) for end in ends)
    assert any("Yes." in end or "user\n" in end for end in ends)
    assert not any("Monday" in end or "mark" in end for end in ends)


def test_moving_head_is_excluded_from_branch_points(tmp_path):
    answer = {"role": "assistant", "content": "Yes."}
    messages = [SYSTEM, USER, answer, {"role": "user", "content": "And a mark?"}]
    _, marks, landmarks = find_parts(tmp_path, "head_at_last_question", messages)
    spoken = [template_form(message) for message in read_messages(messages)]
    ids = landmarks.tokenizer.encode(landmarks.tokenizer.render(spoken, None, {})).ids
    stays = landmarks.tokenizer._tokenizer.decode(ids[: min(marks.branches)])
    assert "Yes." in stays
    assert "keep" not in stays


def test_number_of_remembered_openings_is_bounded(tmp_path):
    _, _, landmarks = find_parts(tmp_path, "chatml", [USER])
    landmarks._openings += tuple(b"<|im_start|>%d" % number for number in range(40))
    landmarks.tokenizer._tokenizer.chat_template += "{# other #}"
    find_parts(tmp_path, "chatml", [USER], landmarks=landmarks)
    template = landmarks.tokenizer._tokenizer.chat_template
    landmarks.tokenizer._tokenizer.chat_template = template.replace("assistant\n{%", "model\n{%")
    find_parts(tmp_path, "chatml", [USER], landmarks=landmarks)
    assert len(landmarks._openings) <= ANSWER_OPENINGS_MAX


@pytest.mark.parametrize(
    ("name", "trims"),
    [("chatml", False), ("thoughts_kept", True), ("headers", True), ("channels", False)],
)
def test_trimming_templates_are_detected(tmp_path, name, trims):
    """Later prompts omit the white space after an answer's text."""
    assert find_parts(tmp_path, name, [SYSTEM, USER])[1].trims_answers is trims
