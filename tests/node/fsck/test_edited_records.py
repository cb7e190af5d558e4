"""The offline check of a node's folder with records of edited memory."""

import json

import pytest

from fabric.edit_mode import EditMode
from node.fsck import run
from node.store.block_files import file_name
from tests.node.turn.test_edited_turns import agent_of, continued, start
from tests.support.agent_traffic import words
from tests.support.samples import sample
from tests.support.services import KEY, ask, running
from tests.support.tiny_models import ONE_LAYER, write_model

AMORTIZE = EditMode.AMORTIZE


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "llama", ONE_LAYER))


def check(folder, capsys, *argv):
    capsys.readouterr()
    status = run.main([f"--data={folder}", f"--keys={folder}", "--json", *argv])
    return status, json.loads(capsys.readouterr().out)["folders"]


@pytest.mark.parametrize("place", sample([0, 1, 2, -1], 1, -1))
def test_repair_cuts_record_within_its_edited_head(tmp_path, model, capsys, place):
    """The rest of the record names its blocks, and its agent continues with it."""
    data = tmp_path / "data"
    node = data / "nodes"
    node.mkdir(parents=True)
    (data / "cluster.key").write_text(KEY.hex())
    (data / "cluster.key").chmod(0o600)
    with running(node, model) as service:
        edited = start(service)
        answer = ask(service, edited, agent="a", edits=AMORTIZE).text
        agent = agent_of(service)
        lost = agent.saved.pieces.blocks[place]
        head = len(agent.saved.edited.origins)
        assert head > 2
        (folder,) = {path.parent for path in node.rglob("manifests")}
    assert check(data, capsys)[0] == 0
    (folder / file_name(lost)).unlink()
    assert check(data, capsys)[0] == 1
    check(data, capsys, "--repair")
    assert check(data, capsys)[0] == 0
    following = continued(edited, answer, words(41, 12))
    with running(node, model) as service:
        saved = agent_of(service)
        if saved is not None and saved.saved is not None:
            service.node.resources.store.layout(saved.saved)
        assert ask(service, following, agent="a", edits=AMORTIZE).finished.durable
