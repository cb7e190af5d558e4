"""Sampling of requests that leave fields out: by settings, by the model, or built in."""

import math
from dataclasses import dataclass

import pytest

from fabric.sampling_defaults import (
    BUILT_IN,
    FROM_MODEL,
    FROM_SETTINGS,
    SamplingDefault,
    chosen_or_built_in,
    filled_in,
    left_out_fields,
    merged_defaults,
    model_defaults,
)
from fabric.settings import parse_settings
from fabric.settings_reader import SettingsError

QWEN = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [1, 2]}


@dataclass
class Body:
    temperature: float | None = None
    top_k: int | None = None


def test_defaults_are_read_from_the_generation_config():
    assert model_defaults(QWEN) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert model_defaults({}) == {}


def test_model_that_does_not_sample_is_greedy():
    assert model_defaults({**QWEN, "do_sample": False})["temperature"] == 0.0
    assert model_defaults({"do_sample": False}) == {"temperature": 0.0}
    assert "temperature" not in model_defaults({"eos_token_id": 1}), "an absent field set a default"


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1}, {"temperature": 2.5}, {"temperature": math.nan},
        {"temperature": "0.6"}, {"temperature": True}, {"top_k": 0.5}, {"top_k": -1},
        {"top_p": 0}, {"top_p": 1.5}, {"min_p": 2}, {"repetition_penalty": 0}, {"top_p": None},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_default_values_are_ignored(wrong):
    assert model_defaults(wrong) == {}
    if None not in wrong.values():
        with pytest.raises(SettingsError, match=f"node.sampling.{next(iter(wrong))}"):
            parse_settings({"node": {"sampling": wrong}})


def test_settings_override_model_defaults_per_field():
    merged = merged_defaults({"top_k": 0, "temperature": None}, model_defaults(QWEN))

    assert merged == (
        SamplingDefault("temperature", 0.6, FROM_MODEL),
        SamplingDefault("top_p", 0.95, FROM_MODEL),
        SamplingDefault("top_k", 0, FROM_SETTINGS),
    )


def test_request_fields_override_all_defaults_even_when_zero():
    defaults = merged_defaults({}, model_defaults(QWEN))
    body = Body(temperature=0.0, top_k=0)
    left_out = left_out_fields(body)

    assert left_out == BUILT_IN.keys() - {"temperature", "top_k"}
    assert filled_in(left_out, defaults) == {"top_p": 0.95}
    assert chosen_or_built_in(body) == {**BUILT_IN, "temperature": 0.0, "top_k": 0}


def test_integer_default_stays_an_integer_over_the_wire():
    filled = filled_in(frozenset(BUILT_IN), [SamplingDefault("top_k", 20.0, FROM_MODEL)])

    assert (filled["top_k"], type(filled["top_k"])) == (20, int)
    strange = [SamplingDefault("no such field", 1, ""), SamplingDefault("top_p", 7, "")]
    assert filled_in(frozenset(BUILT_IN), strange) == {}, "of a node of another version"


def test_sampling_settings_are_parsed_per_field():
    section = {"temperature": 0.7, "top_k": 40}
    sampling = parse_settings({"node": {"sampling": section}}).node.sampling

    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.7, 40, None)
    with pytest.raises(SettingsError, match="did you mean temperature"):
        parse_settings({"node": {"sampling": {"temprature": 0.7}}})
