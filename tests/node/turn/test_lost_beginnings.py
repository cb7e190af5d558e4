"""Where the memory that reached furthest turns out to be lost, the next best serves."""

from fabric.limits import BLOCK_TOKENS
from node.store.block_files import file_name
from tests.node.turn.test_edited_turns import agent_of, history
from tests.support.agent_traffic import words
from tests.support.services import ask, running
from tests.support.tiny_models import LLAMA, write_model

SHARED = (words(1, 60), "Yes.")
ONE, OTHER = history(*SHARED, words(2, 40)), history(*SHARED, words(3, 200))


def test_an_agents_own_memory_serves_where_anothers_is_lost(tmp_path):
    model, disk = str(write_model(tmp_path / "model", LLAMA)), tmp_path / "disk"
    with running(disk, model) as service:
        ask(service, ONE, agent="a")
        ask(service, OTHER, agent="b")
        own, others = agent_of(service).saved, agent_of(service, "b").saved
    common = next(
        at for at, (x, y) in enumerate(zip(own.token_ids, others.token_ids, strict=False)) if x != y
    )
    assert common % BLOCK_TOKENS > 16
    lost = others.pieces[common // BLOCK_TOKENS].block
    (path,) = [path for path in disk.rglob("*.full") if f"blocks/{path.name}" == file_name(lost)]
    path.write_bytes(path.read_bytes()[:-4] + b"lost")
    with running(disk, model) as service:
        reply = ask(service, OTHER, agent="a")
        assert reply.admitted.cached_tokens == common
    with running(tmp_path / "cold", model) as service:
        assert ask(service, OTHER, agent="a").text == reply.text
