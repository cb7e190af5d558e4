"""If the longest matching memory is lost, the next best is used."""

import shutil

import pytest

from fabric.edit_mode import EditMode
from fabric.limits import BLOCK_TOKENS
from fabric.turn.alignment import common_prefix
from node.limits import SPAN_KEPT_TOKENS_MIN
from node.store.block_files import file_name
from tests.node.turn.test_edited_turns import agent_of, history
from tests.support.agent_traffic import words
from tests.support.services import ask, running
from tests.support.tiny_models import ONE_LAYER, write_model

SHARED = (words(1, 35), "Yes.")


def damage(disk, block):
    (path,) = [path for path in disk.rglob("*.full") if f"blocks/{path.name}" == file_name(block)]
    path.write_bytes(path.read_bytes()[:-4] + b"lost")


@pytest.mark.parametrize(
    ("own_words", "others_words"),
    [
        pytest.param(40, 200, id="shorter"),
        pytest.param(200, 10, id="longer than the answer needs room for"),
    ],
)
def test_own_memory_is_used_if_shared_blocks_are_lost(tmp_path, own_words, others_words):
    one, other = (
        history(*SHARED, words(seed, count)) for seed, count in ((2, own_words), (3, others_words))
    )
    model, disk = str(write_model(tmp_path / "model", ONE_LAYER)), tmp_path / "disk"
    with running(disk, model) as service:
        ask(service, one, agent="a")
        ask(service, other, agent="b")
        own, others = agent_of(service).saved, agent_of(service, "b").saved
    common = common_prefix(own.token_ids, others.token_ids)
    assert common % BLOCK_TOKENS > 16
    damage(disk, others.pieces[common // BLOCK_TOKENS].block)
    with running(disk, model) as service:
        reply = ask(service, other, agent="a")
        assert reply.admitted.cached_tokens == common
    with running(tmp_path / "cold", model) as service:
        assert ask(service, other, agent="a").text == reply.text


def test_own_memory_is_used_if_the_prefix_of_borrowed_spans_is_lost(tmp_path):
    one, other = (history(*SHARED, words(seed, count)) for seed, count in ((2, 40), (3, 200)))
    document = words(100, 70)
    messages = [
        *other,
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": document},
    ]
    model, disk = str(write_model(tmp_path / "model", ONE_LAYER)), tmp_path / "disk"
    with running(disk, model) as service:
        ask(service, one, agent="a")
        ask(service, other, agent="b")
        ask(service, history(words(4, 90), "So.", document), agent="c")
        own, others = agent_of(service).saved, agent_of(service, "b").saved
    common = common_prefix(own.token_ids, others.token_ids)
    assert common % BLOCK_TOKENS > SPAN_KEPT_TOKENS_MIN
    shutil.copytree(disk, tmp_path / "whole")
    with running(tmp_path / "whole", model) as service:
        borrowed = ask(service, messages, agent="a", edits=EditMode.ANYWHERE)
        assert borrowed.admitted.match == "spans", "without a loss"
    damage(disk, others.pieces[common // BLOCK_TOKENS].block)
    with running(disk, model) as service:
        reply = ask(service, messages, agent="a", edits=EditMode.ANYWHERE)
        assert reply.admitted.cached_tokens == common
    with running(tmp_path / "cold", model) as service:
        assert ask(service, messages, agent="a").text == reply.text
