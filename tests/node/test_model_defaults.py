"""Defaults in a model's own files reach the turns of a node, and its reported state."""

import json

import pytest

from fabric.control.node_calls import Describe, NodeView
from fabric.sampling_defaults import FROM_MODEL, FROM_SETTINGS, SamplingDefault
from fabric.settings import SamplingSettings
from fabric.turn.generation import FinishReason
from tests.support.services import ask, call, running
from tests.support.tiny_models import ONE_LAYER, write_model

TURN_END = 2  # `<|im_end|>`, which only the template names


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model") / "tiny", ONE_LAYER)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    tokenizer["eos_token"] = "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    sampling = {"eos_token_id": 0, "temperature": 0.6, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    return str(folder)


def test_node_reports_sampling_defaults_and_stops_at_template_end(tmp_path, model):
    own = SamplingSettings(top_k=5, min_p=0.1)
    with running(tmp_path, model, sampling=own) as service:
        view = call(service, Describe(), NodeView)
        forced = ask(service, "hi", max_tokens=8, logit_bias={str(TURN_END): 100.0})
        free = ask(service, "hi", max_tokens=8, ignore_eos=True)

    assert view.sampling == (
        SamplingDefault("temperature", 0.6, FROM_MODEL),
        SamplingDefault("top_k", 5, FROM_SETTINGS),
        SamplingDefault("min_p", 0.1, FROM_SETTINGS),
    )
    assert forced.finished.reason is FinishReason.STOP
    assert forced.text == ""
    assert free.finished.reason is FinishReason.LENGTH


def test_node_without_defaults_reports_no_sampling(tmp_path):
    with running(tmp_path, str(write_model(tmp_path / "plain", ONE_LAYER))) as service:
        assert call(service, Describe(), NodeView).sampling is None
