"""With `amortize`, the cache after an edit is kept and moved.

The same memory answers the same, wherever it comes from: edited in place, read back, moved.
"""

import pytest

from fabric.edit_mode import EditMode
from fabric.ids import AgentId, TenantId
from node.store.block_files import file_name
from tests.support.agent_traffic import words
from tests.support.architectures import ARCHITECTURES, CHUNKED
from tests.support.failing_disk import FailingCalls
from tests.support.samples import sample
from tests.support.services import TENANT, ask, migrate, running
from tests.support.shiftable import SHIFTABLE, with_layers
from tests.support.small_node import on_loop
from tests.support.tiny_models import LLAMA, ONE_LAYER, write_model

AMORTIZE = EditMode.AMORTIZE
OTHER = TenantId("other")
UNSHIFTED = ("llama4", "qwen3_next")
WINDOWED = {name: ARCHITECTURES[name] for name in ("gemma3_text", "gpt_oss", "gemma4_text")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model whose answer depends on the places of moved rows.

    Its exact turns are the same for any encoding of an earlier answer.
    """
    return str(write_model(tmp_path_factory.mktemp("model") / "llama", ONE_LAYER, seed=6))


@pytest.fixture(scope="module")
def stable_model(tmp_path_factory):
    """Return a model that answers the same for any encoding of its earlier answer."""
    return str(write_model(tmp_path_factory.mktemp("model") / "llama", LLAMA, seed=31))


def history(*texts):
    """Return messages of alternating roles after a system prompt."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": words(1, 40)}, *messages]


LONG = [words(10 + i, 60) for i in range(5)]
FIRST = history(*LONG)
SHORT = [words(10 + i, 40) for i in range(5)]


def continued(messages, answer, question):
    return [
        *messages,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": question},
    ]


def agent_of(service, name="a", tenant=TENANT):
    return service.node.resources.table.get((tenant, AgentId(name)))


def start(service, name="a", texts=LONG):
    """Run the whole conversation; return the edited one with the next question."""
    answer = ask(service, history(*texts), agent=name).text
    return continued(history(texts[0], "[cleared]", *texts[2:]), answer, words(40, 12))


def test_rows_after_an_edit_are_not_computed_again(tmp_path, model):
    with running(tmp_path, model) as service:
        edited = start(service)
        exact = ask(service, edited, agent="b")
        kept = ask(service, edited, agent="a", edits=AMORTIZE)

        count = kept.admitted.prompt_tokens
        assert kept.admitted.match == "edit"
        # The answer keeps its sampled tokens; another agent encodes its text.
        assert count <= exact.admitted.prompt_tokens
        computed = count - kept.admitted.cached_tokens
        assert computed < 120 < count // 4
        agent = agent_of(service)
        assert agent.is_durable
        assert agent.saved.edited is not None
        assert agent.saved.pieces.is_edited


def test_edited_memory_answers_the_same_hot_restored_and_continued(tmp_path, model):
    """Edited in memory, or while it is read from disk; each then restored and moved."""
    answers, later = [], []
    for number, is_hot in enumerate((True, False)):
        folder = tmp_path / str(number)
        with running(folder, model, name="node-a") as service:
            edited = start(service)
            if is_hot:
                answers.append(ask(service, edited, agent="a", edits=AMORTIZE))
        with running(folder, model, name="node-a") as service:
            if not is_hot:
                answers.append(ask(service, edited, agent="a", edits=AMORTIZE))
            following = continued(edited, answers[-1].text, words(41, 12))
            later.append(ask(service, following, agent="a", edits=AMORTIZE))
        with running(folder, model, name="node-a") as service:
            following = continued(following, later[-1].text, words(42, 12))
            later.append(ask(service, following, agent="a", edits=AMORTIZE))
    assert answers[0].admitted.cache == "hot"
    assert answers[1].admitted.cache == "disk"
    hot, disk = (reply.admitted.cached_tokens for reply in answers)
    assert hot == disk
    assert answers[0].text == answers[1].text
    assert [reply.text for reply in later[:2]] == [reply.text for reply in later[2:]]
    for reply in later:
        assert reply.admitted.cached_tokens > reply.admitted.prompt_tokens - 120


def test_edited_memory_migrates_to_another_node(tmp_path, model):
    with (
        running(tmp_path / "a", model, name="node-a") as source,
        running(tmp_path / "b", model, name="node-b") as target,
    ):
        edited = start(source)
        answer = ask(source, edited, agent="a", edits=AMORTIZE).text
        following = continued(edited, answer, words(41, 12))
        migrate(source, target, "a", 1)
        there = ask(target, following, agent="a", epoch=2, edits=AMORTIZE)
        assert there.admitted.cached_tokens > there.admitted.prompt_tokens - 120
    with running(tmp_path / "c", model, name="node-a") as undisturbed:
        assert start(undisturbed) == edited
        assert ask(undisturbed, edited, agent="a", edits=AMORTIZE).text == answer
        assert ask(undisturbed, following, agent="a", edits=AMORTIZE).text == there.text


def test_exact_turn_after_an_edit_is_exact(tmp_path, model):
    """The answer equals that of an agent without the edited history."""
    with running(tmp_path, model) as service:
        edited = start(service)
        answer = ask(service, edited, agent="a", edits=AMORTIZE)
        following = continued(edited, answer.text, words(41, 12))
        exact = ask(service, following, agent="a")
        exact_tokens = exact.admitted.cached_tokens
        saved = agent_of(service).saved
    with running(tmp_path / "cold", model) as service:
        cold = ask(service, following, agent="a")
    assert exact.text == cold.text
    assert exact_tokens < answer.admitted.cached_tokens // 2
    assert saved.edited is None
    assert not saved.pieces.is_edited


def test_exact_memory_saved_late_is_stored_as_exact(tmp_path, model, monkeypatch):
    """The disk refuses it at first; its record is exact although the stored one is edited."""
    with running(tmp_path, model) as service:
        edited = start(service)
        answer = ask(service, edited, agent="a", edits=AMORTIZE)
        following = continued(edited, answer.text, words(41, 12))
        faults = FailingCalls().install(monkeypatch)
        faults.is_broken = True
        exact = ask(service, following, agent="a")
        assert not exact.finished.durable
        assert agent_of(service).saved.edited is not None
        faults.mend()
        on_loop(service, service.node.tiers.flusher.flush())
        saved = agent_of(service).saved
        last = continued(following, exact.text, words(42, 12))
        assert ask(service, last, agent="a").admitted.cached_tokens >= saved.tokens_count - 1

    assert saved.tokens_count > len(following[1]["content"])
    assert saved.edited is None


def test_edited_memory_serves_its_own_agent_only(tmp_path, model):
    """No other agent, named or not, and no other tenant reuses it for the same prompt."""
    with running(tmp_path, model) as service:
        edited = start(service)
        answer = ask(service, edited, agent="a", edits=AMORTIZE)
        following = continued(edited, answer.text, words(41, 12))
        exact_tokens = agent_of(service).saved.edited.exact_tokens
        others = [ask(service, following, agent=name, edits=AMORTIZE) for name in (None, "b")]
        assert others[0].admitted.cached_tokens <= exact_tokens
        strangers = ask(service, following, agent="a", tenant=OTHER, edits=AMORTIZE)
        assert strangers.admitted.cached_tokens == 0
        assert "a" not in {reply.admitted.agent for reply in others}
        assert {reply.admitted.amortized_tokens for reply in others} == {0}
        assert {reply.text for reply in others} == {strangers.text}
        assert answer.admitted.amortized_tokens > answer.admitted.cached_tokens // 2


def test_repeated_edits_keep_the_cache_warm(tmp_path, model):
    """Each edit changes the latest history, also text that an earlier one inserted."""
    with running(tmp_path, model) as service:
        messages = start(service)
        for number in range(4):
            reply = ask(service, messages, agent="a", edits=AMORTIZE)
            assert reply.admitted.match == "edit"
            assert reply.admitted.cached_tokens > reply.admitted.prompt_tokens // 2
            edited = [*messages]
            edited[2] = {**edited[2], "content": words(60 + number, 5 + number)}
            if number == 2:
                del edited[3:5]
            messages = continued(edited, reply.text, words(70 + number, 9))
        agent = agent_of(service)
        text, count = agent.manifest.text, len(agent.saved.edited.notes)
        assert count >= 4
        assert words(63, 8) not in text
    with running(tmp_path, model) as service:
        again = ask(service, messages, agent="a", edits=AMORTIZE)
        assert again.admitted.cached_tokens > again.admitted.prompt_tokens // 2


@pytest.mark.parametrize("name", sample((*SHIFTABLE, *WINDOWED), "latent"))
def test_edited_memory_of_movable_models_is_the_same_hot_and_restored(tmp_path, name):
    config = {key: int(n) if n == 64.0 else n for key, n in (SHIFTABLE | WINDOWED)[name].items()}
    if name in SHIFTABLE:
        config = with_layers(config, 2)
    folder = write_model(tmp_path / "model", config)
    with running(tmp_path / "a", str(folder)) as service:
        edited = start(service, texts=SHORT)
        hot = ask(service, edited, agent="a", edits=AMORTIZE)
    with running(tmp_path / "b", str(folder)) as service:
        assert start(service, texts=SHORT) == edited
    with running(tmp_path / "b", str(folder)) as service:
        disk = ask(service, edited, agent="a", edits=AMORTIZE)
    assert (hot.admitted.match, disk.admitted.match) == ("edit", "edit")
    assert hot.admitted.cached_tokens == disk.admitted.cached_tokens
    assert hot.text == disk.text


@pytest.fixture(scope="module")
def wide_window_model(tmp_path_factory):
    """Return a model whose windows cover a third of a conversation."""
    config = ARCHITECTURES["gemma3_text"] | {"num_hidden_layers": 3, "sliding_window": 300}
    return str(write_model(tmp_path_factory.mktemp("model") / "gemma", config))


@pytest.mark.nightly
def test_edited_windows_are_the_same_hot_restored_and_migrated(tmp_path, wide_window_model):
    """A removal needs no computation; hot, restored and migrated memory are the same."""
    whole = history(*SHORT)
    fewer = [*whole[:2], *whole[4:]]
    with running(tmp_path / "a", wide_window_model, name="node-a") as service:
        edited = continued(fewer, ask(service, whole, agent="a").text, words(40, 12))
        hot = ask(service, edited, agent="a", edits=AMORTIZE)
        following = continued(edited, hot.text, words(41, 12))
        first = ask(service, following, agent="a", edits=AMORTIZE)
        assert agent_of(service).is_durable
    with (
        running(tmp_path / "b", wide_window_model, name="node-a") as source,
        running(tmp_path / "c", wide_window_model, name="node-b") as target,
    ):
        ask(source, whole, agent="a")
        ask(source, edited, agent="a", edits=AMORTIZE)
        migrate(source, target, "a", 1)
        moved = ask(target, following, agent="a", epoch=2, edits=AMORTIZE)
    with running(tmp_path / "d", wide_window_model, name="node-a") as service:
        ask(service, whole, agent="a")
    with running(tmp_path / "d", wide_window_model, name="node-a") as service:
        disk = ask(service, edited, agent="a", edits=AMORTIZE)
    with running(tmp_path / "d", wide_window_model, name="node-a") as service:
        last = ask(service, following, agent="a", edits=AMORTIZE)

    assert (hot.admitted.match, hot.admitted.cache) == ("edit", "hot")
    assert disk.admitted.cache == "disk"
    assert hot.text == disk.text
    assert first.text == moved.text == last.text
    for reply in (hot, disk, first, moved, last):
        assert reply.admitted.amortized_tokens > 0
        assert reply.admitted.cached_tokens > reply.admitted.prompt_tokens - 150


def test_lost_windows_before_an_edit_recompute_the_rest(tmp_path, wide_window_model):
    """Lost windows are computed from the first token on, and stored again."""
    with running(tmp_path, wide_window_model) as service:
        edited = start(service, texts=SHORT)
    for path in tmp_path.rglob("*.window"):
        path.write_bytes(path.read_bytes()[:-4] + b"lost")
    with running(tmp_path, wide_window_model) as service:
        reply = ask(service, edited, agent="a", edits=AMORTIZE)
        assert agent_of(service).is_durable
        assert not service.node.resources.store.missing(agent_of(service).saved)
    assert reply.admitted.cached_tokens == 0


@pytest.mark.parametrize("name", sample(UNSHIFTED, "llama4"))
def test_unmovable_models_keep_nothing_after_an_edit_with_reason(tmp_path, name):
    folder = write_model(tmp_path / "model", CHUNKED if name == "llama4" else ARCHITECTURES[name])
    with running(tmp_path / "a", str(folder)) as service:
        edited = start(service, texts=SHORT)
        reply = ask(service, edited, agent="a", edits=AMORTIZE)
        assert "nothing after it is kept" in reply.admitted.match_reason
    with running(tmp_path / "b", str(folder)) as service:
        assert ask(service, edited, agent="a").text == reply.text


def test_lost_blocks_after_an_edit_are_computed(tmp_path, stable_model):
    """The memory equals that of an agent without the edit."""
    with running(tmp_path, stable_model) as service:
        edited = start(service)
        exact = ask(service, edited, agent="b")
        kept = [file_name(ref) for ref in agent_of(service, "a").saved.refs[:2]]
    for path in sorted(tmp_path.rglob("*.full")):
        if f"blocks/{path.name}" not in kept:
            path.write_bytes(path.read_bytes()[:-4] + b"lost")
    with running(tmp_path, stable_model) as service:
        reply = ask(service, edited, agent="a", edits=AMORTIZE)
        assert agent_of(service).is_durable
        assert agent_of(service).saved.edited is None, "it is exact"
    assert reply.text == exact.text
    assert reply.admitted.amortized_tokens == 0


def test_lost_block_of_edited_memory_is_saved_again_from_memory(tmp_path, model):
    """The next turn saves it, and the memory is the same after a restart."""
    with running(tmp_path / "whole", model) as service:
        edited = start(service)
        answer = ask(service, edited, agent="a", edits=AMORTIZE).text
        following = continued(edited, answer, words(41, 12))
        whole = ask(service, following, agent="a", edits=AMORTIZE).text
        last = continued(following, whole, words(42, 12))
        undisturbed = ask(service, last, agent="a", edits=AMORTIZE).text
    with running(tmp_path / "lost", model) as service:
        assert start(service) == edited
        ask(service, edited, agent="a", edits=AMORTIZE)
        store = service.node.resources.store
        for ref in agent_of(service).saved.refs[1:4]:
            store.blocks._quarantine(ref, "test")
        reply = ask(service, following, agent="a", edits=AMORTIZE)
        assert reply.text == whole
        assert agent_of(service).is_durable
        assert not store.missing(agent_of(service).saved)
    with running(tmp_path / "lost", model) as service:
        again = ask(service, last, agent="a", edits=AMORTIZE)
        assert again.admitted.cache == "disk"
        assert again.admitted.cached_tokens > again.admitted.prompt_tokens - 120
        assert again.text == undisturbed
