"""A model's default sampling on a whole fabric."""

import json

import pytest

from tests.support.local_fabric import local_fabric
from tests.support.tiny_models import ONE_LAYER, write_model

# Any vocabulary's row is likely with random weights: seeds differ unless top_k keeps one.
BODY = {"max_tokens": 8, "ignore_eos": True, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    model = write_model(folder / "tiny", ONE_LAYER)
    defaults = {"eos_token_id": 2, "do_sample": True, "temperature": 0.6, "top_k": 1, "top_p": 0.95}
    (model / "generation_config.json").write_text(json.dumps(defaults))
    with local_fabric(folder, str(model), "node-a", "node-b") as instance:
        yield instance


def answers(fabric, **more):
    texts = []
    for seed in range(4):
        body = {"model": "tiny", **BODY, **more, "seed": seed}
        answer = fabric.http.post("/v1/chat/completions", json=body).json()
        texts.append(answer["choices"][0]["message"]["content"])
    return texts


def test_seeds_agree_when_generation_config_keeps_one_token(fabric):
    assert len(set(answers(fabric))) == 1


def test_request_fields_override_model_defaults(fabric):
    assert len(set(answers(fabric, top_k=0, top_p=1.0, temperature=2.0))) == 4
    greedy = answers(fabric, temperature=0)
    assert set(greedy) == set(answers(fabric, temperature=0, top_k=0))
