"""Messages that a template refuses are folded, and the answer reports it."""

import pytest

from fabric.errors import RejectedError
from fabric.ids import AgentId, NodeName
from fabric.turn.generation import Admitted, CacheTier, MatchKind
from router.turns.answer import cache_headers
from tests.support.chat_models import GEMMA2
from tests.support.services import ask, running
from tests.support.tiny_models import LLAMA, write_model

MESSAGES = [{"role": "system", "content": "the cat"}, {"role": "user", "content": "the dog"}]


@pytest.fixture
def settings(tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text(f"{{{{ greeting }}}}{GEMMA2}")
    return {"chat_template": str(template), "template_options": {"greeting": "sat on "}}


def test_response_reports_folded_messages(tmp_path, settings):
    model = str(write_model(tmp_path / "llama", LLAMA))
    with running(tmp_path, model, **settings) as service:
        folded = ask(service, MESSAGES, max_tokens=2).admitted
        plain = ask(service, MESSAGES[1:], max_tokens=2).admitted
        text = service.node.resources.tokenizer.render(MESSAGES[1:], None, {})

    assert folded.template == ("folded the system message into the user's",)
    assert plain.template == ()
    assert text.startswith("sat on <start_of_turn>user\n")


def test_strict_template_refuses_instead_of_folding(tmp_path, settings):
    model = str(write_model(tmp_path / "llama", LLAMA))
    with (
        running(tmp_path, model, **settings, strict_template=True) as service,
        pytest.raises(RejectedError) as caught,
    ):
        ask(service, MESSAGES, max_tokens=2)

    assert caught.value.code == "template_refused"


def test_folding_notes_are_sent_in_a_header():
    names = AgentId("a"), NodeName("n")
    admitted = Admitted(*names, 1, CacheTier.COLD, MatchKind.NONE, 9, 0, "because")
    noted = Admitted(*names, 1, CacheTier.COLD, MatchKind.NONE, 9, 0, "because", ("one", "two"))

    assert cache_headers(noted)["x-macfabric-template"] == "one; two"
    assert "x-macfabric-template" not in cache_headers(admitted)
