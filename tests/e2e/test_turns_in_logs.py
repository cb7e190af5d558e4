"""A node that offers an agent to another node logs the request that caused it."""

import pytest

from tests.support.local_fabric import LocalFabric, local_fabric
from tests.support.logged_turns import logged_turns
from tests.support.tiny_models import ONE_LAYER, write_model

MESSAGES = [{"role": "user", "content": "the cat sat on the mat. " * 40}]


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    model = str(write_model(folder / "model", ONE_LAYER))
    with local_fabric(folder, model, "node-a", "node-b") as instance:
        yield instance


def post(fabric: LocalFabric, verb: str, turn: str, **body: str) -> None:
    path, headers = f"/v1/agents/mira/{verb}", {"x-request-id": turn}
    answer = fabric.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("verb", ["migrate", "replicate"])
def test_offer_of_an_agent_is_logged_with_its_request(fabric, verb):
    home = fabric.chat(MESSAGES, agent="mira").node
    other = "node-b" if home == "node-a" else "node-a"
    turn = f"request-to-{verb}"
    with logged_turns("node") as lines:
        post(fabric, verb, turn, to=other)

    offers = [(message, by) for message, by in lines if f"of an agent to {other}" in message]
    assert offers
    assert {by for _, by in offers} == {turn}
