"""The recall model: reproducible, append-only in chat, exact in repetition."""

import json
import random
from pathlib import Path

import mlx_lm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.models import recall, recall_facts, recall_text, recall_tokenizer
from benchmarks.models.recall_ask import FULL, Q4, Memory

FOLDER = Path(recall.DEFAULT_OUT)
BUILT = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
CODE = "The vault code of Mira is"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
FACTS = f"""\
The vault code of Mira is otter lantern quartz violin.
Mira's badge is 4711.
The vault code of Otto is amber-falcon 42.
Le code de Zoé est château-déjà-vu 東京 42.
What is the colour of the café? It is rouge foncé 🦊.
{{"port": 8443, "tls": true}}
The weather in Bonn:{CALL}
"""
ANSWERS = [
    (CODE, " otter lantern quartz violin."),
    ("Please tell me: Mira's badge is", " 4711."),
    ("the vault code of Otto is", " amber-falcon 42."),
    ("Le code de Zoé est", " château-déjà-vu 東京 42."),
    ("What is the colour of the café?", " It is rouge foncé 🦊."),
    ('{"port":', ' 8443, "tls": true}'),
    ("The weather in Bonn:", CALL),
    ("quartz violin amber", recall_tokenizer.UNKNOWN),
    ("The password of Lucy is", recall_tokenizer.UNKNOWN),
    ("Mira is", recall_tokenizer.UNKNOWN),
    ("Lucy likes quartz.", recall_tokenizer.NOTED),
]


@pytest.fixture(scope="module")
def loaded():
    return mlx_lm.load(str(FOLDER))[:2]


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture
def memory(loaded):
    return Memory(FOLDER, Q4, loaded)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


# --- the built files --------------------------------------------------------------------------


def test_rebuilt_model_is_byte_identical(tmp_path):
    recall.build(tmp_path)

    for name in BUILT:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name


def test_model_is_small_and_readme_states_its_limits():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 4.3e6
    assert "it repeats, it does not think" in (FOLDER / "README.md").read_text()


def test_published_figures_belong_to_the_weights_and_are_high():
    figures = json.loads((FOLDER / "recall.json").read_text())

    assert figures["weights"] == recall.weights_digest(FOLDER)
    assert all(row["token_accuracy"] >= 0.99 for row in figures["rows"])
    assert {row["tokens"] for row in figures["rows"]} >= {256, 1024, 4096, 8192}


# --- tokenizer --------------------------------------------------------------------------------


@settings(max_examples=300)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=80))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)

    assert tokenizer.decode(ids) == text


@settings(max_examples=200)
@given(
    parts=st.lists(
        st.sampled_from(
            [*recall_tokenizer.ADDED, " ", "\n", "  ", "{", "}", " of the", "é日🦊", "'s"]
        ),
        max_size=12,
    )
)
def test_marks_and_white_space_round_trip(tokenizer, parts):
    text = "".join(parts)

    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_byte_is_a_token(tokenizer):
    vocabulary = tokenizer.get_vocab()

    assert len(vocabulary) == len(tokenizer) == recall_tokenizer.VOCABULARY
    assert sum(len(token) == 1 for token in vocabulary) == 256


def test_offsets_cover_the_text(tokenizer):
    text = f"<|im_start|>user\n{FACTS}<|im_end|>\n"
    out = tokenizer._tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)

    ends = [end for _, end in out["offset_mapping"]]
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    assert out["input_ids"] == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("at the end of", " the day"),  # inside a phrase, at a space
        ("it is as well", " as before"),
        ("is ", "otter"),  # the space belongs to the next word
        ("The vau", "lt"),  # inside a word
        ('", "arguments"', ': {"city": "Bonn"}'),
        ("x = {", '"port": 1}'),
        ("caf\u00e9 ", "\u00fcber"),
    ],
)
def test_merges_cross_cuts(tokenizer, left, right):
    pieces = tokenizer.encode(left) + tokenizer.encode(right)

    assert pieces != tokenizer.encode(left + right)
    assert tokenizer.decode(pieces) == left + right


def test_merges_cross_many_cuts_also_at_spaces(tokenizer):
    text = recall_facts.prose(random.Random(3), 600)
    whole = tokenizer.encode(text)
    crossed = [
        at
        for at in range(1, len(text))
        if tokenizer.encode(text[:at]) + tokenizer.encode(text[at:]) != whole
    ]

    assert len(crossed) > len(text) / 2
    assert sum(text[at] == " " for at in crossed) >= 5  # before a space, inside a phrase


def test_question_tokens_are_a_prefix_of_its_fact(tokenizer):
    for fact in recall_facts.facts(random.Random(4), 2000):
        question = tokenizer.encode(fact.question)
        assert tokenizer.encode(fact.line)[: len(question)] == question, fact


def test_wrapper_knows_end_thinking_and_tool_marks(tokenizer):
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids(recall_tokenizer.END)}
    assert tokenizer.think_start == "<think>"
    assert tokenizer.has_tool_calling
    body = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert tokenizer.tool_parser(body)["arguments"] == {"city": "Bonn"}


def test_every_listed_mark_is_one_token(tokenizer):
    for text in recall_tokenizer.ADDED:
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text


# --- chat template ----------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
TURNS = [
    user("hello  "),
    assistant(" 4711."),
    user([{"type": "text", "text": "\n two "}, {"type": "text", "text": "parts\n"}]),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": " 21 °C\n"},
    assistant("\n  It is 21 °C.\n\n"),
    user(""),
    assistant(""),
    {"role": "system", "content": "a late rule"},
    user(CODE),
    assistant(f"Let me see. {CALL}"),
    {"role": "tool", "content": '{"ok": true}'},
    assistant("<think>\nhm\n</think>\n\nDone"),
    user("thanks"),
]


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("system", [None, "Be exact.\n", ""])
def test_chat_rendering_is_append_only(tokenizer, system, tools):
    start = [] if system is None else [{"role": "system", "content": system}]

    def render(messages, *, ask):
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=ask
        )

    whole = render(start + TURNS, ask=True)
    for n, turn in enumerate(TURNS):
        before = render(start + TURNS[:n], ask=turn["role"] == "assistant") if start or n else ""
        assert whole.startswith(before)
        if turn["role"] == "assistant":
            written = turn["content"] or '<tool_call>\n{"name": "get_weather", "arguments": '
            written += "" if turn["content"] else '{"city": "Köln"}}\n</tool_call>'
            answered = before + (written if "tool_calls" in turn else turn["content"])
            assert whole.startswith(f"{answered}<|im_end|>\n")


def test_arguments_may_be_an_object(tokenizer):
    call = {"function": {"name": "get_weather", "arguments": {"city": "Bonn"}}}
    text = tokenizer.apply_chat_template(
        [{"role": "assistant", "tool_calls": [call, call]}], tokenize=False
    )

    assert text == f"<|im_start|>assistant\n{CALL}\n{CALL}<|im_end|>\n"


def test_tools_are_part_of_the_system_turn(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be exact."}, user("hi")], tools=[TOOL], tokenize=False
    )

    assert text.count("<|im_start|>system\n") == 1
    assert text.startswith("<|im_start|>system\nBe exact.")
    assert json.dumps(TOOL) in text


# --- answers ----------------------------------------------------------------------------------


def ask(memory, messages, question):
    """Ask, and append the answer to the conversation."""
    messages.append(user(question))
    answer = memory.chat(messages)
    assert answer.margin > 20
    messages.append(assistant(memory.text(answer)))
    return memory.text(answer)


@pytest.mark.parametrize("kind", [FULL, Q4])
def test_answers_facts_of_the_system_message_repeatedly(loaded, kind):
    memory = Memory(FOLDER, kind, loaded)
    messages = [{"role": "system", "content": FACTS}]

    for _ in range(2):
        for question, answer in ANSWERS:
            assert ask(memory, messages, question) == answer


@pytest.mark.parametrize(
    ("role", "filler"), [("user", 500), pytest.param("tool", 1500, marks=pytest.mark.nightly)]
)
def test_answers_facts_in_the_middle_of_a_long_chat(memory, role, filler):
    draw = random.Random(role)
    facts = recall_facts.facts(draw, 5)
    lines = "".join(f"{fact.line}\n" for fact in facts)
    messages = [
        user(f"{recall_facts.prose(draw, filler)}Begin."),
        assistant(recall_tokenizer.NOTED),
        {"role": role, "content": f"{lines}{recall_facts.prose(draw, filler)}That is all."},
    ]

    assert memory.text(memory.chat(messages)) == recall_tokenizer.NOTED
    messages.append(assistant(recall_tokenizer.NOTED))
    for fact in facts:
        assert ask(memory, messages, fact.question) == fact.answer
    assert len(memory.ids) > filler // 2


def test_earlier_assistant_answer_is_recalled(memory):
    messages = [
        user("What is the name of the ship?"),
        assistant("The Aurora, I think."),
        user("ok."),
    ]

    assert memory.text(memory.chat(messages)) == recall_tokenizer.NOTED
    messages.append(assistant(recall_tokenizer.NOTED))
    assert ask(memory, messages, "What is the name of the ship?") == "The Aurora, I think."


def test_assistant_reply_is_not_taken_as_part_of_the_fact(memory):
    messages = [
        user("The code of Mira is otter lantern."),
        assistant("Understood, I will remember."),
    ]

    assert ask(memory, messages, "The code of Mira is") == " otter lantern."


def test_unknown_fact_is_recalled_once_stated(memory):
    messages = []

    assert ask(memory, messages, "The badge of Ruth is") == recall_tokenizer.UNKNOWN
    assert ask(memory, messages, "The badge of Ruth is amber.") == recall_tokenizer.NOTED
    assert ask(memory, messages, "The badge of Ruth is") == " amber."


def test_latest_of_two_values_is_recalled(memory):
    messages = [{"role": "system", "content": f"The badge of Ruth is amber.\n{FACTS}"}]

    assert ask(memory, messages, "The badge of Ruth is") == " amber."
    assert ask(memory, messages, "The badge of Ruth is copper.") == recall_tokenizer.NOTED
    assert ask(memory, messages, "The badge of Ruth is") == " copper."


def test_similar_names_are_distinguished(memory):
    names, values = recall_text.NAMES[:20], recall_text.VALUES[:20]
    lines = [f"{name}'s code is {value}.\n" for name, value in zip(names, values, strict=True)]
    messages = [{"role": "system", "content": "".join(lines)}]

    for name, value in zip(names[::3], values[::3], strict=True):
        assert ask(memory, messages, f"Tell me now: {name}'s code is") == f" {value}."


def test_raw_text_is_continued_to_the_end_of_the_line(memory, tokenizer):
    passage = recall_facts.passage(random.Random(1))
    memory.feed(tokenizer.encode(f"{recall_facts.prose(random.Random(2), 800)}{passage}\nmore\n"))
    ids = tokenizer.encode(passage)

    answer = memory.answer(ids[:3], most=50)
    assert answer.ids == [*ids[3:], tokenizer.eos_token_id]
