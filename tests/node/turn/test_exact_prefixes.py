"""Rows computed before an edit serve exact turns to the last token, also from disk."""

import pytest

from fabric.edit_mode import EditMode
from fabric.limits import BLOCK_TOKENS
from node.store.block_files import file_name
from tests.node.turn.test_edited_turns import agent_of, continued, start
from tests.support.agent_traffic import words
from tests.support.services import ask, running
from tests.support.tiny_models import ONE_LAYER, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "llama", ONE_LAYER, seed=6))


def edit(service):
    """Edit an agent's memory; return its next messages and the number of exact tokens."""
    edited = start(service)
    answer = ask(service, edited, agent="a", edits=EditMode.AMORTIZE)
    exact = agent_of(service).saved.edited.exact_tokens
    assert exact % BLOCK_TOKENS > 16
    return continued(edited, answer.text, words(41, 12)), exact


def test_exact_turn_reuses_all_rows_before_the_edit(tmp_path, model):
    with running(tmp_path, model) as service:
        following, exact = edit(service)
        cut = agent_of(service).saved.pieces.unedited(exact).tokens_count
    assert cut < exact
    with running(tmp_path, model) as service:
        reply = ask(service, following, agent="a")
        last = continued(following, reply.text, words(42, 12))
        assert agent_of(service).saved.edited is None
    assert (reply.admitted.cached_tokens, reply.admitted.amortized_tokens) == (exact, 0)
    with running(tmp_path, model) as service:  # and the saved memory is exact, too
        later = ask(service, last, agent="a")
        assert later.admitted.cached_tokens > later.admitted.prompt_tokens - 120
    with running(tmp_path / "cold", model) as service:
        cold = ask(service, following, agent="a")
        assert cold.admitted.cached_tokens == 0
        assert reply.text == cold.text
        assert later.text == ask(service, last, agent="a").text


def test_damaged_partial_block_leaves_the_whole_blocks_before_it(tmp_path, model):
    with running(tmp_path, model) as service:
        following, exact = edit(service)
        pieces = agent_of(service).saved.pieces
        whole = pieces.unedited(exact)
        cut = file_name(pieces[len(whole)].block)
    (path,) = [path for path in tmp_path.rglob("*.full") if f"blocks/{path.name}" == cut]
    path.write_bytes(path.read_bytes()[:-4] + b"lost")
    with running(tmp_path, model) as service:
        reply = ask(service, following, agent="a")
        assert reply.admitted.cached_tokens == whole.tokens_count
    with running(tmp_path / "cold", model) as service:
        assert ask(service, following, agent="a").text == reply.text
