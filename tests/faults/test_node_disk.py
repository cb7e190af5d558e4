"""A whole node on a failing disk: right answers, correct durability, and later saves."""

import asyncio
import errno
import itertools

import pytest

from fabric.control.node_calls import AgentList, Done, Flush, ListAgents
from fabric.errors import CorruptDataError
from fabric.turn.generation import CacheTier
from node.limits import FLUSH_FAILURES_MAX
from tests.support.architectures import ARCHITECTURES
from tests.support.failing_disk import CALLS, WRITES, FailingCalls
from tests.support.services import ask, call, running
from tests.support.tiny_models import LLAMA, write_model
from tests.support.waiting import wait_until

SMALL = {**LLAMA, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
WORDS = "the cat sat on the mat and the dog sat on the log. "
WITH_OTHER_GROUPS = ("gemma4_text", "qwen3_5")  # windows; recurrent states
BRIEF = {"max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "small", SMALL))


@pytest.fixture(scope="module")
def cold_answer(model, tmp_path_factory):
    """Return a function that gives the answer of a healthy node to each prompt."""
    with running(tmp_path_factory.mktemp("cold"), model) as service:
        known = {}

        def answer(prompt: str) -> str:
            if prompt not in known:
                known[prompt] = ask(service, prompt, agent=f"cold-{len(known)}", **BRIEF).text
            return known[prompt]

        yield answer


def view_of(service, agent: str):
    listed = call(service, ListAgents(), AgentList)
    return next(entry.view for entry in listed.agents if entry.view.agent == agent)


def cool_all(service) -> None:
    """Drop every cache that may be dropped, on the node's loop."""

    async def cool() -> None:
        service.node.resources.table.drop_resident(0)

    asyncio.run_coroutine_threadsafe(cool(), service._loop).result(60)


def lengthened(prompt: str, text: str) -> str:
    return f"{prompt}{text} and then {WORDS * 2}"


REFUSALS = {
    "full": (errno.ENOSPC, WRITES),
    "over quota": (errno.EDQUOT, WRITES),
    "read-only": (errno.EROFS, ("open", *WRITES)),
    "no descriptors": (errno.EMFILE, ("open",)),
    "failing": (errno.EIO, CALLS),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_turns_on_a_refusing_disk_are_saved_after_recovery(
    model, cold_answer, tmp_path, monkeypatch, name
):
    """The turn succeeds and is reported as not durable; it is saved once the disk works."""
    cause, calls = REFUSALS[name]
    faults = FailingCalls(cause, calls).install(monkeypatch)
    prompt = WORDS * 12
    with running(tmp_path, model, durability="full") as service:
        first = ask(service, prompt, agent="hurt", **BRIEF)
        assert first.finished.durable
        longer = lengthened(prompt, first.text)
        faults.is_broken = True
        second = ask(service, longer, agent="hurt", **BRIEF)
        assert faults.failed
        assert second.text == cold_answer(longer)
        assert second.admitted.cache is CacheTier.HOT
        assert not second.finished.durable
        assert service.node.health.degraded
        assert service.node.view().degraded
        view = view_of(service, "hurt")
        assert (view.durable, "hot" in view.tiers) == (False, True)
        # Nothing drops it from memory, not even a flush of hot caches.
        note = call(service, Flush(drop_hot=True), Done).detail
        assert "memory only" in note
        assert service.node.resources.table.get(("default", "hurt")).cache is not None
        third = ask(service, WORDS * 5, agent="other", **BRIEF)
        assert third.text == cold_answer(WORDS * 5)
        assert not third.finished.durable

        faults.mend()
        assert ask(service, WORDS * 6, agent="healthy", **BRIEF).finished.durable
        for agent in ("hurt", "other"):
            wait_until(
                lambda key=("default", agent): service.node.resources.table.get(key).is_durable
            )
            assert view_of(service, agent).durable
        call(service, Flush(drop_hot=True), Done)
        assert service.node.health.degraded is None
        assert service.node.resources.table.hot_bytes == 0
        assert service.node.resources.store.blocks.check_integrity() == []
        again = ask(service, lengthened(longer, second.text), agent="hurt", **BRIEF)
        assert again.admitted.cache is CacheTier.DISK
        assert again.admitted.cached_tokens >= second.admitted.prompt_tokens
        assert again.text == cold_answer(lengthened(longer, second.text))


@pytest.mark.parametrize("how", ["flush", "stop"])
def test_unsaved_agents_are_saved_on_flush_and_at_shutdown(
    model, cold_answer, tmp_path, monkeypatch, how
):
    faults = FailingCalls(errno.ENOSPC, WRITES).install(monkeypatch)
    prompt = WORDS * 12
    with running(tmp_path, model, durability="full") as service:
        faults.is_broken = True
        assert not ask(service, prompt, agent="hurt", **BRIEF).finished.durable
        faults.mend()
        if how == "flush":
            assert "durable" in call(service, Flush(), Done).detail
            assert view_of(service, "hurt").durable
    with running(tmp_path, model, durability="full") as service:
        reply = ask(service, prompt, agent="hurt", **BRIEF)
        assert reply.admitted.cache is CacheTier.DISK
        assert reply.admitted.cached_tokens == reply.admitted.prompt_tokens - 1
        assert reply.text == cold_answer(prompt)


def test_unsavable_agents_do_not_block_others(model, tmp_path, monkeypatch):
    faults = FailingCalls(errno.ENOSPC, WRITES).install(monkeypatch)
    with running(tmp_path, model, durability="full") as service:
        faults.is_broken = True
        for number in range(FLUSH_FAILURES_MAX + 1):
            ask(service, f"{number} {WORDS}", agent=f"agent-{number}", **BRIEF)
        publish = service.node.resources.store.publish

        def refusing(record, previous):
            if record.agent != f"agent-{FLUSH_FAILURES_MAX}":
                raise CorruptDataError("blocks went")  # noqa: TRY003 - as the store does
            publish(record, previous)

        monkeypatch.setattr(service.node.resources.store, "publish", refusing)
        faults.mend()
        call(service, Flush(), Done)
        durable = [a.key[1] for a in service.node.resources.table if a.is_durable]
        assert durable == [f"agent-{FLUSH_FAILURES_MAX}"]


@pytest.mark.parametrize("reason", ["idle", "wanted"])
def test_unsaved_agents_are_retried(model, tmp_path, monkeypatch, reason):
    """An agent over the hot budget stays in memory until it is on disk, and is then dropped."""
    if reason == "idle":
        monkeypatch.setattr("node.upkeep.FLUSH_IDLE_S", 0.05)
    monkeypatch.setattr("node.upkeep.FLUSH_RETRY_S", 0.0)
    faults = FailingCalls(errno.ENOSPC, WRITES).install(monkeypatch)
    with running(tmp_path, model, durability="full") as service:
        faults.is_broken = True
        assert not ask(service, WORDS * 12, agent="hurt", **BRIEF).finished.durable
        agent = service.node.resources.table.get(("default", "hurt"))
        for _ in range(2):  # retried and refused again
            refused = len(faults.failed)
            if reason == "wanted":
                service._make_room(1)
            wait_until(lambda refused=refused: len(faults.failed) > refused)
        cool_all(service)
        assert agent.cache is not None
        faults.mend()
        if reason == "wanted":
            service._make_room(1)
        wait_until(lambda: agent.is_durable)
        cool_all(service)
        assert agent.cache is None
        assert service.node.health.degraded is None


def turn_with_failure_at(service, faults, point, prompt):
    """Take a turn in which disk operation `point` fails; return the reply."""
    faults.point, faults.calls_count, faults.is_broken = point, 0, True
    reply = ask(service, prompt, agent="hurt", **BRIEF)
    faults.mend()
    return reply


def check_every_point(model, cold_answer, tmp_path, monkeypatch, causes, step):
    """Fail the n-th operation of a turn, for every `step`-th n; then continue and restart."""
    failures = 0
    for cause in causes:
        faults = FailingCalls(cause).install(monkeypatch)
        folder = tmp_path / str(cause)
        for point in itertools.count(0, step):
            start = f"{point} {WORDS * 6}"
            with running(folder / str(point), model, durability="full") as service:
                first = ask(service, start, agent="hurt", **BRIEF)
                bystander = ask(service, WORDS * 3, agent="other", **BRIEF)
                cool_all(service)
                second = turn_with_failure_at(service, faults, point, lengthened(start, first.text))
                assert second.text == cold_answer(lengthened(start, first.text)), point
                agent = service.node.resources.table.get(("default", "hurt"))
                assert agent.is_durable == second.finished.durable, point
                assert second.finished.durable or service.node.health.degraded
                failures += len(faults.failed)
                was_reached = bool(faults.failed)
                faults.failed.clear()
                assert ask(service, WORDS * 3, agent="other", **BRIEF).text == bystander.text
                call(service, Flush(drop_hot=True), Done)
                assert view_of(service, "hurt").durable
                assert service.node.health.degraded is None
                assert service.node.resources.store.blocks.check_integrity() == []
            with running(folder / str(point), model, durability="full") as service:
                reply = ask(service, lengthened(start, first.text), agent="hurt", **BRIEF)
                assert reply.admitted.cache is CacheTier.DISK, point
                assert reply.text == second.text, point
            if not was_reached:
                break
    return failures


def test_sampled_disk_failures_during_a_turn_are_survived(
    model, cold_answer, tmp_path, monkeypatch
):
    assert check_every_point(model, cold_answer, tmp_path, monkeypatch, [errno.EIO], 7) >= 3


@pytest.mark.nightly
def test_every_disk_failure_during_a_turn_is_survived(model, cold_answer, tmp_path, monkeypatch):
    causes = [errno.EIO, errno.ENOSPC, errno.EMFILE]
    assert check_every_point(model, cold_answer, tmp_path, monkeypatch, causes, 1) > 30


def test_slow_disk_does_not_change_answers(model, cold_answer, tmp_path, monkeypatch):
    faults = FailingCalls(calls=(), delay_s=0.01).install(monkeypatch)
    prompt = WORDS * 12
    with running(tmp_path, model, durability="full") as service:
        faults.is_broken = True
        reply = ask(service, prompt, agent="slow", **BRIEF)
        assert reply.finished.durable
        assert reply.text == cold_answer(prompt)
        assert service.node.health.degraded is None
        cool_all(service)
        again = ask(service, prompt, agent="slow", **BRIEF)
        assert again.admitted.cache is CacheTier.DISK
        assert again.text == reply.text
    assert faults.calls_count > 10


@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(name, marks=pytest.mark.nightly) for name in WITH_OTHER_GROUPS)],
)
def test_turn_saved_late_is_restored_bit_exactly(tmp_path, monkeypatch, name):
    """Windows and recurrent states are restored as if the disk had never failed."""
    config = SMALL if name == "llama" else ARCHITECTURES[name]
    model = str(write_model(tmp_path / "model", config))
    prompts = [WORDS * 24 + "größer naïve " * times for times in (0, 8, 9)]

    def talk(service, number: int):
        reply = ask(service, prompts[number], agent="a", logprobs=1, **BRIEF)
        return [entry for event in reply.events for entry in getattr(event, "logprobs", ())]

    with running(tmp_path, model, "calm") as service:
        want = []
        for number in range(len(prompts)):
            want.append(talk(service, number))
            cool_all(service)  # so that each turn continues from the disk, as in the other run
    faults = FailingCalls(errno.ENOSPC, WRITES).install(monkeypatch)
    with running(tmp_path, model, "hurt") as service:
        got = [talk(service, 0)]
        cool_all(service)
        faults.is_broken = True
        got.append(talk(service, 1))
        assert not view_of(service, "a").durable
        faults.mend()
    with running(tmp_path, model, "hurt") as service:
        got.append(talk(service, 2))
        assert service.node.resources.table.get(("default", "a")).last_match.cached_tokens > 256
    assert got == want
