"""A budget of thoughts is kept by ending the thought as the model's family writes it."""

import pytest

from fabric.errors import RejectedError
from fabric.ids import OperationId, TenantId
from fabric.settings import EffortBudgets, NodeSettings
from fabric.turn.generation import (
    GenerateRequest,
    Identity,
    IdentityKind,
    Resumption,
    Sampling,
    ThoughtLimit,
)
from fabric.turn.messages import Message, MessageRole
from node.dialect.format_selection import MESSAGE_FORMATS, THOUGHT_FORMATS, FormatSettings
from node.mlx.answer import Answer
from node.mlx.thought_budget import ThoughtBudget, ThoughtBudgets, ThoughtEndings
from tests.support.chat_models import (
    HARMONY,
    HARMONY_SPECIALS,
    OPENED,
    QWEN_SPECIALS,
    chat_tokenizer,
)

USER = {"role": "user", "content": "hi"}
PROMPT = (Message(MessageRole.USER, ("hi",)),)
END = "<|im_end|>"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
# White space around a thought's marks in the template, different at each place.
SPACING = ("\n", "\n\n", "\n")


def template_of(thought, *, opens):
    opening, before, after = (space.replace("\n", "\\n") for space in SPACING)
    written = (
        f"{{{{ '{thought.start}{opening}' + m.reasoning_content + '{before}{thought.end}{after}' "
        "if m.reasoning_content }}"
    )
    return (
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
        + written
        + "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n"
        + (thought.start + SPACING[0] if opens else "")
        + "{% endif %}"
    )


def specials_of(thought):
    start = thought.start.partition("thought")[0] if thought.name == "gemma4" else thought.start
    return ("<|im_start|>", start, thought.end)


@pytest.fixture(params=sorted(THOUGHT_FORMATS))
def thought(request):
    return THOUGHT_FORMATS[request.param]


def begin(tokenizer, tokens, *, tools=None):
    begun = tokenizer.rendered([USER], tools, {}).begun
    answer = Answer(tokenizer, begun, (), tools)
    endings = ThoughtEndings(tokenizer)
    return ThoughtBudget(answer, begun, endings, tokens, may_call=tools is not None)


def follow(tokenizer, budget, *, free, ways=()):
    """Produce the tokens of `free` as a model; return the text up to the end of the steering.

    `ways` lists the tokens to choose if the steering allows several.
    """
    produced, words = [], list(tokenizer.encode(free).ids)
    choices = list(tokenizer.encode("".join(ways)).ids)
    while True:
        steering = budget.steering
        if steering is not None and not steering.bars:
            allowed = steering.ids
            token = next(iter(allowed)) if len(allowed) == 1 else choices[0]
            choices = choices[1:] if choices and choices[0] in allowed else choices
            assert token in allowed
        elif words:
            token = words.pop(0)
        else:
            return tokenizer.decode(produced)
        if steering is not None and steering.bars:
            assert token not in steering.ids
        produced.append(token)
        budget.take(token)
        if len(produced) > 400:
            return tokenizer.decode(produced)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_thought_end_is_written_as_in_the_familys_template(tmp_path, thought, tokens):
    tokenizer = chat_tokenizer(tmp_path, template_of(thought, opens=True), specials_of(thought))
    assert tokenizer.format.thought == thought
    text_out = follow(tokenizer, begin(tokenizer, tokens), free="abcde"[:tokens])
    opening, before, after = SPACING
    assert text_out == "abcde"[:tokens] + before + thought.end + after
    whole = tokenizer.render(
        [USER, {"role": "assistant", "content": "", "reasoning_content": "abcde"[:tokens] or "-"}],
        None,
        {},
        opens_answer=False,
    )
    written = whole.partition(thought.start)[2].rpartition(END)[0]
    assert written == opening + ("abcde"[:tokens] or "-") + before + thought.end + after


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_thought_opened_by_the_model_is_ended_the_same_way(tmp_path, thought, tokens):
    tokenizer = chat_tokenizer(tmp_path, template_of(thought, opens=False), specials_of(thought))
    opened = thought.start + SPACING[0]
    budget = begin(tokenizer, tokens)
    assert budget.steering is None  # a thought may begin
    text_out = follow(tokenizer, budget, free=thought.start)
    if tokens == 0:
        assert text_out == opened + SPACING[1] + thought.end + SPACING[2]
    else:
        assert text_out == thought.start
        text_out += follow(tokenizer, budget, free="abcde"[:tokens])
        end = SPACING[1] + thought.end + SPACING[2]
        assert text_out == thought.start + "abcde"[:tokens] + end
    assert budget.steering.bars  # the mark that would begin another thought


def test_thought_below_its_budget_is_unchanged(tmp_path, thought):
    tokenizer = chat_tokenizer(tmp_path, template_of(thought, opens=True), specials_of(thought))
    budget = begin(tokenizer, 9)
    text_out = follow(tokenizer, budget, free=f"abc{thought.end}\nan answer that is longer")
    assert text_out == f"abc{thought.end}\nan answer that is longer"
    assert budget.steering is None


def test_thought_mark_in_answer_text_is_not_steered(tmp_path, thought):
    tokenizer = chat_tokenizer(tmp_path, template_of(thought, opens=True), specials_of(thought))
    budget = begin(tokenizer, 2)
    text_out = follow(tokenizer, budget, free=f"abThe mark {thought.start} begins one")
    assert text_out.endswith(f"The mark {thought.start} begins one")
    assert budget.steering is None


def test_existing_white_space_before_the_end_is_not_repeated(tmp_path):
    tokenizer = chat_tokenizer(tmp_path, OPENED, QWEN_SPECIALS)
    assert ThoughtEndings(tokenizer).spacing == ("\n", "\n", "\n\n")  # the family's
    for text, end in (
        ("ab", "\n</think>\n\n"),
        ("a\n", "</think>\n\n"),
        ("", "\n</think>\n\n"),
        ("\n", "</think>\n\n"),
    ):
        budget = begin(tokenizer, len(text))
        assert follow(tokenizer, budget, free=text) == text + end


def test_thoughts_of_one_answer_share_the_budget(tmp_path):
    tokenizer = chat_tokenizer(tmp_path, OPENED, QWEN_SPECIALS)
    budget = begin(tokenizer, 5)
    text_out = follow(tokenizer, budget, free="abc</think>\n\n<think>de")
    assert text_out == "abc</think>\n\n<think>de\n</think>\n\n"
    assert budget.steering.bars


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_budget_never_cuts_a_character(tmp_path, tokens):
    tokenizer = chat_tokenizer(tmp_path, OPENED, QWEN_SPECIALS)  # a token for each byte
    text_out = follow(tokenizer, begin(tokenizer, tokens), free="\U0001f600")
    assert text_out == "\U0001f600\n</think>\n\n"


def test_wait_for_a_complete_character_is_bounded(tmp_path):
    tokenizer = chat_tokenizer(tmp_path, OPENED, QWEN_SPECIALS)
    budget, lead = begin(tokenizer, 1), tokenizer.encode("\U0001f600").ids[0]
    count = 0
    while budget.steering is None:
        budget.take(lead)
        count += 1
    assert count == 4


def test_budget_never_cuts_a_call_in_a_thought(tmp_path):
    """A call in a thought counts; only the text after it shows whether it is quoted."""
    template = OPENED + "{{ '<tool_call>' if never }}"
    tokenizer = chat_tokenizer(tmp_path, template, QWEN_SPECIALS)
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    budget = begin(tokenizer, 5, tools=[LOOK])
    assert follow(tokenizer, budget, free=f"abc{call}") == f"abc{call}"
    assert follow(tokenizer, budget, free=" s") == " s\n</think>\n\n"


def harmony(folder):
    return chat_tokenizer(folder, HARMONY, HARMONY_SPECIALS, end="<|return|>")


SWITCH = "<|end|><|start|>assistant<|channel|>"


@pytest.mark.parametrize("tokens", [1, 4])
def test_harmony_switches_to_the_final_channel(tmp_path, tokens):
    tokenizer, text = harmony(tmp_path), "abcd"[:tokens]
    text_out = follow(
        tokenizer, begin(tokenizer, tokens), free=f"<|channel|>analysis<|message|>{text}"
    )
    assert text_out == f"<|channel|>analysis<|message|>{text}{SWITCH}final<|message|>"


def test_harmony_skips_the_thought_with_zero_budget(tmp_path):
    tokenizer = harmony(tmp_path)
    text_out = follow(tokenizer, begin(tokenizer, 0), free="<|channel|>")
    assert text_out == "<|channel|>final<|message|>"


@pytest.mark.parametrize("channel", ["final", "commentary"])
def test_harmony_may_call_after_the_budget_is_spent(tmp_path, channel):
    tokenizer = harmony(tmp_path)
    budget = begin(tokenizer, 2, tools=[LOOK])
    start = "<|channel|>analysis<|message|>ab"
    text_out = follow(tokenizer, budget, free=start, ways=(channel,))
    rest = "<|message|>" if channel == "final" else ""
    assert text_out == f"{start}{SWITCH}{channel}{rest}"
    if channel == "commentary":  # and no further thought
        more = follow(tokenizer, budget, free=f"<|message|>well{SWITCH}", ways=("final",))
        assert more == f"<|message|>well{SWITCH}final<|message|>"


def test_every_message_format_is_covered_by_these_tests():
    assert set(MESSAGE_FORMATS) == {"harmony"}  # tested above


def test_thought_end_is_the_familys_for_templates_without_thoughts(tmp_path):
    settings = FormatSettings(thoughts="think")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    tokenizer = chat_tokenizer(tmp_path, template, QWEN_SPECIALS, settings=settings)
    assert ThoughtEndings(tokenizer).close("well") == tuple(tokenizer.encode("\n</think>\n\n").ids)


def test_thought_end_is_the_familys_if_rendering_is_refused(tmp_path):
    template = (
        "{% for m in messages %}{{ raise_exception('never') if m.role == 'assistant' }}"
        "{{ m.content }}{% endfor %}<think></think>"
    )
    tokenizer = chat_tokenizer(tmp_path, template, QWEN_SPECIALS)
    with pytest.raises(RejectedError):
        tokenizer.render([USER, {"role": "assistant", "content": "hi"}], None, {})
    assert ThoughtEndings(tokenizer).spacing == ("\n", "\n", "\n\n")


def test_white_space_stripped_by_the_end_token_is_omitted(tmp_path):
    tokenizer = chat_tokenizer(tmp_path, OPENED, QWEN_SPECIALS, rstrip=True)
    (mark,) = ThoughtEndings(tokenizer).close("well")
    assert tokenizer.decode([mark]) == "</think>"


def request_of(thoughts=None, resume=None, tokens=1_000, **more):
    return GenerateRequest(
        OperationId("op-12345"),
        TenantId("default"),
        Identity(IdentityKind.CONTENT),
        Sampling(max_tokens=tokens, thoughts=thoughts),
        **({"messages": PROMPT} | more),
        resume=resume,
    )


@pytest.mark.parametrize("taken", range(1, 12))
def test_resumed_budget_steers_like_an_uninterrupted_one(tmp_path, taken):
    """The thought's end is begun by one node and completed by the next."""
    tokenizer = chat_tokenizer(tmp_path, OPENED, QWEN_SPECIALS)
    budgets = ThoughtBudgets(tokenizer, NodeSettings())
    opened = tokenizer.rendered([USER], None, {}).begun
    ids = tokenizer.encode("abcd\n</think>\n\nso").ids

    def begin_budget(resume):
        request = request_of(ThoughtLimit(4), resume)
        return budgets.begin(request, opened, Answer(tokenizer, opened, (), None))

    alone, wanted = begin_budget(None), []
    for token in ids:
        wanted.append(alone.steering)
        alone.take(token)
    assert [each is not None and not each.bars for each in wanted] == [
        *[False] * 4,
        *[True] * 4,
        *[False] * 2,
    ]
    taken = min(taken, len(ids) - 1)
    resumed = begin_budget(Resumption(tuple(ids[:taken]), ids[taken], (), 0))
    for at in range(taken, len(ids)):
        assert resumed.steering == wanted[at]
        resumed.take(ids[at])


@pytest.mark.parametrize(
    ("limit", "tokens"),
    [
        (None, 77),
        (ThoughtLimit(5), 5),
        (ThoughtLimit(5, "none"), 5),
        (ThoughtLimit(0), 0),
        (ThoughtLimit(effort="none"), 0),
        (ThoughtLimit(effort="minimal"), 512),
        (ThoughtLimit(effort="low"), 1_024),
        (ThoughtLimit(effort="medium"), 3),
        (ThoughtLimit(effort="high"), 24_576),
        (ThoughtLimit(effort="xhigh"), None),
        (ThoughtLimit(effort="max"), None),
        (ThoughtLimit(effort="a lot"), 77),
        (ThoughtLimit(effort="__class__"), 77),
    ],
)
def test_budget_comes_from_the_request_or_settings(tmp_path, limit, tokens):
    tokenizer = chat_tokenizer(tmp_path, OPENED, QWEN_SPECIALS)
    settings = NodeSettings(thinking_budget=77, effort_budgets=EffortBudgets(medium=3))
    assert ThoughtBudgets(tokenizer, settings).tokens_max(limit) == tokens


def test_template_reading_effort_gets_no_budget_for_effort(tmp_path):
    reads = OPENED + "{{ reasoning_effort if reasoning_effort == 'never' }}"
    budgets = ThoughtBudgets(chat_tokenizer(tmp_path, reads, QWEN_SPECIALS), NodeSettings())
    assert budgets.tokens_max(ThoughtLimit(effort="low")) is None
    assert budgets.tokens_max(ThoughtLimit(effort="none")) == 0
    assert budgets.tokens_max(ThoughtLimit(9, "low")) == 9


def test_budget_applies_only_to_chats_that_may_exceed_it(tmp_path):
    budgets = ThoughtBudgets(chat_tokenizer(tmp_path / "a", OPENED, QWEN_SPECIALS), NodeSettings())
    assert budgets.applies(request_of(ThoughtLimit(9)))
    assert not budgets.applies(request_of())
    assert not budgets.applies(request_of(ThoughtLimit(9), tokens=9))
    assert not budgets.applies(request_of(ThoughtLimit(9), messages=None, prompt="a completion"))
    plain = chat_tokenizer(tmp_path / "b", "{{ messages[0].content }}", ())
    assert not ThoughtBudgets(plain, NodeSettings()).applies(request_of(ThoughtLimit(9)))
