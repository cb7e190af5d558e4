"""A node's defaults fill what a request leaves out, in every dialect, and nothing else."""

import pytest

from fabric.sampling_defaults import BUILT_IN, FROM_MODEL, FROM_SETTINGS, SamplingDefault
from tests.router.fake_node import MODEL, FakeNode
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
DEFAULTS = (
    SamplingDefault("temperature", 0.6, FROM_MODEL),
    SamplingDefault("top_p", 0.95, FROM_MODEL),
    SamplingDefault("top_k", 20, FROM_SETTINGS),
    SamplingDefault("min_p", 0.05, FROM_MODEL),
    SamplingDefault("repetition_penalty", 1.1, FROM_MODEL),
    SamplingDefault("presence_penalty", 1.5, FROM_SETTINGS),
)
FILLED = {**BUILT_IN, **{each.field: each.value for each in DEFAULTS}}
USER = [{"role": "user", "content": "hi"}]
ROUTES = {
    "/v1/chat/completions": {"model": MODEL, "messages": USER},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/responses": {"model": MODEL, "input": "hi"},
    "/v1/messages": {"model": MODEL, "messages": USER, "max_tokens": 9},
    "/v1/agents/mira/generate": {"text": "hi"},
}


def sampling_values(request):
    return {name: getattr(request.sampling, name) for name in BUILT_IN}


def node_with_defaults(**changes):
    node = FakeNode("node-a")
    node.view_changes = {"sampling": DEFAULTS, **changes}
    return node


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ROUTES)
async def test_omitted_sampling_fields_use_node_defaults(path, stream):
    async with rig(nodes=[node_with_defaults()]) as fabric:
        answer = await fabric.http().post(path, json={**ROUTES[path], "stream": stream})
        assert answer.status_code == 200, answer.text

    (request,) = fabric["node-a"].requests
    assert sampling_values(request) == FILLED
    assert request.sampling.seed is None


@pytest.mark.parametrize("path", ROUTES)
async def test_explicit_sampling_fields_are_kept(path):
    own = {"temperature": 0, "top_p": 1.0}
    if "generate" not in path:
        own["top_k"] = 0
    async with rig(nodes=[node_with_defaults()]) as fabric:
        await fabric.http().post(path, json={**ROUTES[path], **own})
        path_of_another = path.replace("mira", "ivan")
        await fabric.http().post(path_of_another, json={**ROUTES[path], **dict.fromkeys(own)})

    first, second = fabric["node-a"].requests
    assert sampling_values(first) == {**FILLED, **own}
    assert sampling_values(second) == FILLED, "null is left out"


async def test_several_answers_share_defaults_with_distinct_seeds():
    async with rig(nodes=[node_with_defaults()]) as fabric:
        await fabric.chat("hi", n=3, seed=7)

    requests = fabric["node-a"].requests
    assert all(sampling_values(request) == FILLED for request in requests)
    assert {request.sampling.seed for request in requests} == {7, 8, 9}


async def test_each_model_has_its_own_sampling_defaults():
    nodes = [node_with_defaults(), FakeNode("node-b", model="plain")]
    async with rig(nodes=nodes) as fabric:
        for model in (MODEL, "plain"):
            answer = await fabric.chat("hi", model=model)
            assert answer.status_code == 200, answer.text

    assert sampling_values(fabric["node-a"].requests[0]) == FILLED
    assert sampling_values(fabric["node-b"].requests[0]) == dict(BUILT_IN)


async def test_node_list_shows_effective_sampling_defaults():
    async with rig(nodes=[node_with_defaults()]) as fabric:
        for operates in (True, False):
            http = fabric.http(operates=operates)
            (row,) = (await http.get("/v1/nodes")).json()["data"]
            assert row["sampling"] == {
                "temperature": {"value": 0.6, "source": "generation_config.json"},
                "top_p": {"value": 0.95, "source": "generation_config.json"},
                "top_k": {"value": 20, "source": "settings"},
                "min_p": {"value": 0.05, "source": "generation_config.json"},
                "repetition_penalty": {"value": 1.1, "source": "generation_config.json"},
                "frequency_penalty": {"value": 0.0, "source": "built in"},
                "presence_penalty": {"value": 1.5, "source": "settings"},
            }
