"""An edited agent as a file is restored unchanged in any fabric."""

import random

import pytest

from fabric.control.hibernation_calls import Resume
from fabric.edit_mode import EditMode
from fabric.errors import RejectedError
from fabric.ids import AgentId
from tests.node.turn.test_edited_turns import LONG, agent_of, continued, history, start
from tests.support.agent_traffic import words
from tests.support.hibernation import BROUGHT_KEY, frame_ends, hibernate, resume
from tests.support.services import TENANT, ask, running
from tests.support.tiny_models import ONE_LAYER, write_model

AMORTIZE = EditMode.AMORTIZE
OTHER_FABRIC = b"z" * 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "llama", ONE_LAYER))


def edit(service):
    """Edit an agent's history; return the messages of its next turn."""
    edited = start(service)
    answer = ask(service, edited, agent="a", edits=AMORTIZE).text
    return continued(edited, answer, words(41, 12))


def test_edited_agent_is_restored_unchanged(tmp_path, model):
    """Resumed under another name, in another fabric, and after a restart there."""
    with running(tmp_path / "here", model) as here:
        following = edit(here)
        file, leaving = hibernate(here, "a"), hibernate(here, "a", key=BROUGHT_KEY)
        resume(here, file, "b")
        wanted = ask(here, following, agent="a", edits=AMORTIZE)
        restored = ask(here, following, agent="b", epoch=2, edits=AMORTIZE)
        assert restored.text == wanted.text
        assert restored.admitted.cached_tokens == wanted.admitted.cached_tokens
        assert restored.admitted.amortized_tokens == wanted.admitted.amortized_tokens > 0
    with running(tmp_path / "there", model, cluster_key=OTHER_FABRIC) as there:
        resume(there, leaving, "c", key=BROUGHT_KEY)
        saved = agent_of(there, "c").saved
        assert saved.edited.problem(saved.pieces, saved.token_ids) is None
        there.node.resources.store.layout(saved)  # raises if a block is not named
    with running(tmp_path / "there", model, cluster_key=OTHER_FABRIC) as there:
        restored = ask(there, following, agent="c", epoch=2, edits=AMORTIZE)
        assert restored.text == wanted.text
        assert restored.admitted.cached_tokens == wanted.admitted.cached_tokens


def test_block_used_in_several_pieces_is_restored_once(tmp_path, model):
    """No pin keeps the block after its agent is evicted."""
    with running(tmp_path, model) as service:
        first = history(LONG[0], words(5, 4), *LONG[2:])
        answer = ask(service, first, agent="a").text
        edited = history(LONG[0], "gone", *LONG[2:])
        ask(service, continued(edited, answer, words(6, 9)), agent="a", edits=AMORTIZE)
        resume(service, hibernate(service, "a"), "b")
        blocks = agent_of(service, "b").saved.pieces.blocks
        assert len(set(blocks)) < len(blocks)
        assert not service.node.resources.store.blocks._index._pins


def test_damage_anywhere_in_an_edited_file_is_refused(tmp_path, model):
    with running(tmp_path, model) as service:
        edit(service)
        file = hibernate(service, "a")
        rng, ends = random.Random(3), [8, *frame_ends(file)]
        spots = {at + i for at in ends[:-1] for i in (0, 6)} | {end - 1 for end in ends[1:]}
        spots |= {rng.randrange(len(file)) for _ in range(40)}
        for at in sorted(spots):
            flipped = bytearray(file)
            flipped[at] ^= 1 << rng.randrange(8)
            assert _is_refused(service, bytes(flipped)), at


def _is_refused(service, raw):
    arriving = service.node.moves.imports.begin(Resume(TENANT, AgentId("back"), 2))
    try:
        arriving.feed(raw)
        arriving.finish()
    except RejectedError:
        return True
    finally:
        arriving.abandon()
    return False
