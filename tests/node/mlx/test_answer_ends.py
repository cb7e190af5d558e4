"""End tokens of answers: all that a model's files name, and its template's own."""

import json

import pytest

from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.loaded_model import load_model
from node.mlx.model_files import read_end_ids, read_sampling
from tests.node.mlx.test_family_templates import FAMILIES
from tests.support.chat_models import (
    HARMONY,
    HARMONY_SPECIALS,
    QWEN3,
    QWEN_SPECIALS,
    chat_tokenizer,
)
from tests.support.template_shapes import SHAPES
from tests.support.tiny_models import ONE_LAYER, SPECIALS, write_model

ELSEWHERE = "<|another_end|>"  # which the tokenizer names, as base models do
TEXT_END, TURN_START, TURN_END = range(3)  # ids of SPECIALS
# These do not close an answer themselves: the next message's header does, or there are several.
OPEN_ENDED = {"role_tokens", "channels"}


def write_files(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config": {"eos_token_id": [2, 0]}, "generation_config": {"eos_token_id": 0}}, {0, 2}),
        ({"config": {"eos_token_id": 0}, "generation_config": {"eos_token_id": [1, 2]}}, {0, 1, 2}),
        ({"config": {"text_config": {"eos_token_id": 2}}, "generation_config": {}}, {2}),
        ({"config": {"eos_token_id": None}}, set()),
        ({"config": {"eos_token_id": [2, True, "x", -1, 999]}}, {2}),
        ({"config": {}, "generation_config": "{not JSON"}, set()),
        ({"config": {}, "generation_config": "[1]"}, set()),
    ],
    ids=str,
)
def test_end_ids_are_read_from_all_files(tmp_path, files, ends):
    write_files(tmp_path, **files)

    assert read_end_ids(tmp_path, 300) == ends


def test_end_ids_of_files_tokenizer_and_template_are_combined(tmp_path):
    folder = write_model(tmp_path / "model", ONE_LAYER)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    write_files(
        folder,
        config={**config, "eos_token_id": [TURN_START]},
        generation_config={"eos_token_id": TEXT_END},
        tokenizer_config={**tokenizer, "eos_token": "<think>"},
    )
    ends = ChatTokenizer(load_model(str(folder)).tokenizer).eos_ids

    assert ends == {TURN_START, TEXT_END, SPECIALS.index("<think>"), TURN_END}


@pytest.mark.parametrize("name", FAMILIES)
def test_turn_end_is_read_from_the_familys_template(tmp_path, name):
    family = FAMILIES[name]
    specials = (*family.specials, family.end)
    model = chat_tokenizer(tmp_path, family.template, specials, end=ELSEWHERE)

    assert {model.special_texts[end] for end in model.eos_ids} == {ELSEWHERE, family.end}


@pytest.mark.parametrize("name", SHAPES)
def test_turn_end_is_read_from_templates_that_close_turns(tmp_path, name):
    shape = SHAPES[name]
    model = chat_tokenizer(tmp_path, shape.template, (*shape.specials, shape.end), end=ELSEWHERE)
    ends = {model.special_texts[end] for end in model.eos_ids} - {ELSEWHERE}

    assert ends == (set() if name in OPEN_ENDED else {shape.end})


def test_message_end_within_an_answer_is_not_an_answer_end(tmp_path):
    model = chat_tokenizer(tmp_path, HARMONY, HARMONY_SPECIALS, end=ELSEWHERE)

    assert {model.special_texts[end] for end in model.eos_ids} == {ELSEWHERE}


def test_mark_used_within_answers_is_not_an_answer_end(tmp_path):
    # Its thought ends as its turn does.
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}"
        "{{ m.reasoning_content }}<|im_end|>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    model = chat_tokenizer(tmp_path, template, QWEN_SPECIALS, end=ELSEWHERE)

    assert {model.special_texts[end] for end in model.eos_ids} == {ELSEWHERE}


def test_operators_template_is_read_like_the_models_own(tmp_path):
    model = chat_tokenizer(tmp_path, None, QWEN_SPECIALS, end=ELSEWHERE)
    assert {model.special_texts[end] for end in model.eos_ids} == {ELSEWHERE}

    model = chat_tokenizer(tmp_path, QWEN3, QWEN_SPECIALS, end=ELSEWHERE)
    assert {model.special_texts[end] for end in model.eos_ids} == {ELSEWHERE, "<|im_end|>"}


def test_invalid_sampling_default_is_logged_without_its_value(tmp_path, caplog):
    write_files(tmp_path, generation_config={"temperature": 9.5, "top_k": 20, "top_p": None})

    assert read_sampling(tmp_path) == {"top_k": 20}
    assert "temperature" in caplog.text
    assert "9.5" not in caplog.text
    assert "top_p" not in caplog.text
