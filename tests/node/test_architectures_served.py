"""Whole nodes with models of every reuse class: turns, restarts, moves, and no reuse at all."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fabric.turn.generation import CacheTier, Delta, MatchKind
from node.self_test import SelfTests
from node.service import NodeService
from tests.support.architectures import ARCHITECTURES, OPAQUE
from tests.support.samples import sample
from tests.support.services import Reply, ask, migrate, running, start_service
from tests.support.tiny_models import write_model

SYSTEM = {"role": "system", "content": "the cat sat on the mat and the dog sat on the log. " * 30}
TURNS = ("naïve café 東京", "größer " * 20)
# A window with shared layers, a latent with an index, states beside attention, and beside latents.
CLASSES = ("gemma4_text", "glm_moe_dsa", "qwen3_5", "kimi_linear")


@pytest.fixture(scope="module", params=sample(CLASSES, "kimi_linear"))
def model(request, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / request.param
    return str(write_model(folder, ARCHITECTURES[request.param]))


def logprobs_of(reply: Reply) -> list[tuple[str, float]]:
    entries = (event.logprobs for event in reply.events if isinstance(event, Delta))
    return [(entry.token, entry.logprob) for group in entries for entry in group]


def converse(
    service: Callable[[], NodeService], between: Callable[[], None], epoch: Callable[[], int]
) -> tuple[list[list[tuple[str, float]]], list[Reply]]:
    """Run some turns; return answers as text that encodes to the same tokens."""
    messages, replies = [SYSTEM], []
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        reply = ask(
            service(), messages, agent="agent", epoch=epoch(), max_tokens=6, logprobs=1,
            ignore_eos=True,
        )  # fmt: skip
        replies.append(reply)
        messages.append({"role": "assistant", "content": reply.text})
        if text is not TURNS[-1]:
            between()
    return [logprobs_of(reply) for reply in replies], replies


def test_restarts_and_migrations_change_no_bit(model, tmp_path):
    """Compare log probabilities of all turns: undisturbed, restarted, and moved between turns."""
    with running(tmp_path, model, "calm") as undisturbed:
        assert undisturbed.node.background.self_tests.found.passed, (
            undisturbed.node.background.self_tests.found.detail
        )
        want, replies = converse(lambda: undisturbed, lambda: None, lambda: 1)
        assert [reply.admitted.cache for reply in replies] == [
            CacheTier.COLD, CacheTier.HOT,
        ]  # fmt: skip
        again = ask(undisturbed, [SYSTEM, {"role": "user", "content": TURNS[0]}], max_tokens=2)
        other = ask(undisturbed, [SYSTEM, {"role": "user", "content": "other"}], max_tokens=2)

    assert again.admitted.cached_tokens >= 256  # blocks stored by another agent's turn
    assert other.admitted.cached_tokens >= 256
    with running(tmp_path, model, "left") as left, running(tmp_path, model, "right") as right:
        nodes, moves = [left, right], []

        def move() -> None:
            moves.append(migrate(nodes[0], nodes[1], "agent", len(moves) + 1))
            nodes.reverse()

        got, replies = converse(lambda: nodes[0], move, lambda: len(moves) + 1)
    assert got == want
    assert [reply.admitted.cache for reply in replies[1:]] == [CacheTier.PEER]

    current = [start_service(tmp_path, model, "reborn")]

    def restart() -> None:
        current[-1].stop()
        current.append(start_service(tmp_path, model, "reborn"))

    got, replies = converse(lambda: current[-1], restart, lambda: 1)
    current[-1].stop()
    assert got == want
    assert [reply.admitted.cache for reply in replies[1:]] == [CacheTier.DISK]


@pytest.mark.parametrize("name", sample(["qwen3_5", "kimi_linear", "gemma4_text"], "qwen3_5"))
def test_changed_answer_text_recomputes_only_that_answer(name, tmp_path):
    """A client strips part of an answer: the state after the prompt is still in memory.

    The same state is read from disk after a restart.
    """
    model = str(write_model(tmp_path / name, ARCHITECTURES[name]))

    def take_second_turn(service: NodeService, between: Callable[[], NodeService]) -> Reply:
        messages = [SYSTEM, {"role": "user", "content": TURNS[0]}]
        first = ask(service, messages, agent="agent", max_tokens=6, ignore_eos=True)
        messages += [{"role": "assistant", "content": "another"}, {"role": "user", "content": "?"}]
        reply = ask(
            between(), messages, agent="agent", epoch=1, max_tokens=6, logprobs=1, ignore_eos=True
        )
        assert reply.admitted.cached_tokens >= first.admitted.prompt_tokens - 1
        return reply

    with running(tmp_path, model, "calm") as undisturbed:
        hot = take_second_turn(undisturbed, lambda: undisturbed)
    services = [start_service(tmp_path, model, "reborn")]

    def restart() -> NodeService:
        services[-1].stop()
        services.append(start_service(tmp_path, model, "reborn"))
        return services[-1]

    cold = take_second_turn(services[0], restart)
    services[-1].stop()
    assert hot.admitted.cache is CacheTier.HOT
    assert cold.admitted.cache is CacheTier.DISK
    assert logprobs_of(hot) == logprobs_of(cold)


def test_model_with_unknown_caches_is_served_without_reuse(tmp_path):
    """Answers are correct, nothing is stored, and reply and view give the reason."""
    folder = str(write_model(tmp_path / "opaque", OPAQUE))
    with running(tmp_path, folder) as service:
        messages = [SYSTEM, {"role": "user", "content": "alpha"}]
        first, second = (ask(service, messages, agent="agent", max_tokens=5) for _ in range(2))
        view = service.node.view()

    assert first.text == second.text
    assert second.admitted.cache is CacheTier.COLD
    assert second.admitted.match is MatchKind.NONE
    assert "served without reuse" in second.admitted.match_reason
    assert not view.reuse
    assert not view.self_test.passed
    assert "LayerCache" in view.self_test.detail
    assert view.agents == view.tokens == 0


def test_model_failing_its_self_test_is_served_without_reuse(tmp_path, monkeypatch):
    """Memory that is not restored bit for bit is not used, and the node reports it."""
    folder = str(write_model(tmp_path / "llama", ARCHITECTURES["llama"]))
    monkeypatch.setattr(SelfTests, "_compare", _differs)
    with running(tmp_path, folder, tries_everything=True) as service:
        messages = [SYSTEM, {"role": "user", "content": "alpha"}]
        replies = [ask(service, messages, agent="agent", max_tokens=5) for _ in range(2)]
        stored = service.node.resources.store.blocks.total_bytes

    assert replies[0].text == replies[1].text
    assert [reply.admitted.cache for reply in replies] == [CacheTier.COLD] * 2
    assert "answers differently" in replies[1].admitted.match_reason
    assert stored == 0


async def _differs(_node) -> tuple[bool, str]:
    return False, "the restored agent answers differently"


@pytest.mark.nightly
def test_long_prompts_of_window_models_store_every_block(tmp_path: Path):
    """Blocks that left the window while the prompt was computed are stored, too."""
    folder = str(write_model(tmp_path / "gpt", ARCHITECTURES["gpt_oss"]))
    prompt = "the cat sat on the mat. " * 160
    with running(tmp_path, folder) as service:
        ask(service, prompt, agent="agent", max_tokens=2)
        record = next(iter(service.node.resources.table)).saved

    assert record is not None
    assert [place.start for place in record.windows] == list(range(0, record.tokens_count, 256))
    assert len(record.windows) > 3
