"""A conversation stays one agent while its client rewrites clocks, reminders and old results."""

import itertools
import json

import pytest

from fabric.control.directive_calls import ChangeSettings
from fabric.control.erasure_calls import EraseAgent, EraseReceipt
from fabric.control.node_calls import AgentView
from fabric.ids import AgentId, OperationId, TenantId
from node.fsck import run as fsck
from node.tiers.disk_budget import record_bytes
from tests.support.agent_traffic import TOOLS, Driver, Talk, corpus, drop_thought, words
from tests.support.scripted_answers import scripted
from tests.support.services import TENANT, ask, call, running
from tests.support.small_node import SMALL, check, on_loop, stored
from tests.support.template_shapes import SHAPES, write_shape
from tests.support.tiny_models import write_model

MORE = words(2, 300)
_operations = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return str(write_shape(folder / "model", SHAPES["thought_opened"], "full", corpus()))


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "small", SMALL))


def clock(minute):
    return {"role": "system", "content": f"Keep it.\nNow: 2026-11-28 09:{minute:02}:31.\n{MORE}"}


def clock_moves(talk, turns=4):
    for turn in range(turns):
        talk.messages[0] = clock(turn)
        talk.ask()


def reminder_moves(talk):
    for turn in range(4):
        plain = words(940 + turn, 40)
        talk.ask(f"{plain}\n<system-reminder>{words(990 + turn, 20)}</system-reminder>")
        talk.messages[-2]["content"] = plain


def results_are_elided(talk):
    talk.ask(call=("read", {"path": "0"}))
    for step in range(4):
        use = talk.messages[-1]["tool_calls"][0]
        result = {"role": "tool", "tool_call_id": use["id"], "content": words(700 + step, 60)}
        talk.messages.append(result)
        results = [message for message in talk.messages if message["role"] == "tool"]
        for old in results[:-1]:
            old["content"] = "[Old tool result content cleared]"
        talk.answer(call=("read", {"path": str(step)}))


def agents_of(service, tenant=TENANT):
    return [agent for agent in service.node.resources.table if agent.key[0] == tenant]


@pytest.mark.slow
@pytest.mark.parametrize("drops", [False, True], ids=["thoughts sent", "thoughts left out"])
def test_rewritten_history_stays_one_agent_with_full_reuse(model, tmp_path, drops):
    with scripted() as script, running(tmp_path, model) as service:
        for number, rewrite in enumerate((clock_moves, reminder_moves, results_are_elided)):
            tenant = TenantId(f"tenant-{number}")
            driver = Driver(service, SHAPES["thought_opened"], script, tenant=tenant)
            talk = Talk(driver, tools=TOOLS)
            talk.echo = drop_thought if drops else talk.echo
            rewrite(talk)
            assert len({turn.agent for turn in driver.turns}) == 1, rewrite
            assert len(agents_of(service, tenant)) == 1, rewrite
            assert driver.share > 0.97, (rewrite, driver.turns)
        script.end = None


def test_only_a_continuation_is_the_same_conversation(small_model, tmp_path):
    """Another question after the same prompt, or the same one repeated, is another conversation."""

    def chat(minute, *texts, **options):
        history = [clock(minute)]
        for text in texts[:-1]:
            history.append({"role": "user", "content": text})
            history.append({"role": "assistant", "content": answers[text]})
        reply = ask(service, [*history, {"role": "user", "content": texts[-1]}], **options)
        answers[texts[-1]] = reply.text
        return reply.admitted.agent

    answers = {}
    other = {"tenant": TenantId("other")}
    with running(tmp_path, small_model) as service:
        first = chat(1, "Where is it?")
        assert chat(2, "Where is it?", "And now?") == first
        assert chat(3, "Who is it?") != first
        twin = chat(4, "Where is it?")
        assert twin != first
        assert chat(5, "Where is it?", "Why there?") == twin  # its answer was the same
        assert chat(6, "Where is it?", "Why there?", "Thanks.") == twin
        assert chat(7, "Where is it?", "And now?", "Thanks.") == first
        assert chat(8, "Where is it?", "And now?", "Thanks.", "Bye.", **other) != first
        assert chat(9, "Where is it?", "And now?", "Thanks.", "Bye.", group="g") != first
        named = chat(10, "Where is it?", "And now?", "Thanks.", "Bye.", agent="mine")
        assert named == "mine"
        assert chat(11, "Where is it?", "And now?", "Thanks.", "Bye.", "Oh.") not in {named, twin}


def test_private_or_busy_agent_is_not_rewritten(small_model, tmp_path):
    with running(tmp_path, small_model) as service:
        agent, history = start(service)
        on_loop(service, hold_turn_lock(agent))
        assert take_turn(service, 2, history).admitted.agent != agent.key[1]
        on_loop(service, release(agent))
        assert take_turn(service, 3, history).admitted.agent == agent.key[1]
    with running(tmp_path / "b", small_model) as service:
        agent, history = start(service)
        private = ChangeSettings(*agent.key, None, is_private=True)
        call(service, private, AgentView)
        assert take_turn(service, 2, history).admitted.agent != agent.key[1]


async def hold_turn_lock(agent):
    await agent.turn_lock.acquire()


async def release(agent):
    agent.turn_lock.release()


def start(service):
    """Begin a conversation; return its agent and history."""
    history = [{"role": "user", "content": words(7, 200)}]
    reply = ask(service, [clock(1), *history])
    history.append({"role": "assistant", "content": reply.text})
    return service.node.resources.table.get((TENANT, reply.admitted.agent)), history


def take_turn(service, minute, history, text="And now?"):
    return ask(service, [clock(minute), *history, {"role": "user", "content": text}])


def rewrite_twice(service):
    """Rewrite a conversation's clock twice; return its agent, its history and the first one."""
    agent, old = start(service)
    history = list(old)
    for minute in (2, 3):
        reply = take_turn(service, minute, history, f"{words(30 + minute, 100)}?")
        assert reply.admitted.agent == agent.key[1]
        history.append({"role": "user", "content": f"{words(30 + minute, 100)}?"})
        history.append({"role": "assistant", "content": reply.text})
    assert [len(branch.refs) > 0 for branch in agent.saved.branches] == [True, True]
    assert agent.view().branches == 2
    return agent, history, old


def test_reverted_history_is_warm_from_its_branch(small_model, tmp_path):
    with running(tmp_path, small_model) as service:
        agent, history, old = rewrite_twice(service)
        before = {ref for branch in agent.saved.branches for ref in branch.refs}
        again = take_turn(service, 2, history)  # the client reverts its last rewrite
        assert again.admitted.agent == agent.key[1]
        assert again.admitted.cached_tokens > again.admitted.prompt_tokens // 2
        assert again.text == ask(
            service,
            [clock(2), *history, {"role": "user", "content": "And now?"}],
            tenant=TenantId("cold"),
        ).text  # fmt: skip
        after = {ref for branch in agent.saved.branches for ref in branch.refs}
        assert before & {*agent.saved.refs}
        assert not after & {*agent.saved.refs}
        # A client that returns to before the last question starts another conversation.
        back = take_turn(service, 1, old, "And before?")
        assert back.admitted.agent != agent.key[1]
        assert back.admitted.cached_tokens > back.admitted.prompt_tokens // 2


def test_branches_survive_a_restart(small_model, tmp_path):
    with running(tmp_path, small_model) as service:
        agent, history, _ = rewrite_twice(service)
        branches, form = agent.saved.branches, agent.saved.form
    with running(tmp_path, small_model) as service:
        (agent,) = agents_of(service)
        assert (agent.saved.branches, agent.saved.form) == (branches, form)
        assert service.node.resources.store.blocks.check_integrity() == []
        again = take_turn(service, 2, history)
        assert again.admitted.agent == agent.key[1]
        assert again.admitted.cache == "disk"
        assert again.admitted.cached_tokens > again.admitted.prompt_tokens // 2


@pytest.mark.parametrize("is_own", [False, True], ids=["of another", "of its own"])
def test_branches_are_evicted_before_agents(small_model, tmp_path, is_own):
    with running(tmp_path, small_model) as service:
        agent, history, _ = rewrite_twice(service)
        ask(service, words(50, 300), agent="other")
        size_bytes = service.node.resources.store.blocks.total_bytes
        size_bytes += sum(record_bytes(each.saved) for each in agents_of(service))
    with running(tmp_path, small_model, disk_bytes=size_bytes + 1) as service:
        seen = service.node.resources.table.use._seen
        used_s, steady_s = seen[TENANT, "other"]
        seen[TENANT, "other"] = (used_s, steady_s - 10_000)  # the least valuable agent
        if is_own:
            reply = take_turn(service, 3, history, words(60, 150))
            assert reply.admitted.match == "extend"
            expected = {agent.key[1], "other"}
        else:
            reply = ask(service, words(60, 150), agent="next")
            expected = {agent.key[1], "other", "next"}
        assert reply.finished.durable
        assert stored(service) == expected
        kept = service.node.resources.table.get(agent.key)
        assert kept.saved.branches is None
        check(service, size_bytes + 1)


def test_erasure_removes_branches(small_model, tmp_path, capsys):
    data = tmp_path / "data"
    with running(data / "nodes", small_model) as service:
        agent, *_ = rewrite_twice(service)
        refs = {*agent.saved.kept_refs}
        assert len(refs) > len({*agent.saved.refs})
        now_s = service.node.resources.clock.wall_s()
        operation = OperationId(f"erase-form-{next(_operations)}")
        call_ = EraseAgent(*agent.key, 1_001, operation, now_s)
        receipt = call(service, call_, EraseReceipt)
        assert receipt.blocks_removed == len(refs)
        assert service.node.resources.store.blocks.total_bytes == 0
    assert fsck.main([f"--data={data}", "--json"]) == 0
    (folder,) = json.loads(capsys.readouterr().out)["folders"]
    assert (folder["records"], folder["blocks"]) == (0, 0)


def test_offline_check_accepts_branches_with_missing_blocks(small_model, tmp_path, capsys):
    def run_check(*argv):
        capsys.readouterr()
        status = fsck.main([f"--data={tmp_path}", "--json", *argv])
        (folder,) = json.loads(capsys.readouterr().out)["folders"]
        return status, [f["kind"] for f in folder["findings"] if f["severity"] != "note"]

    with running(tmp_path / "nodes", small_model) as service:
        agent, *_ = rewrite_twice(service)
        root, key = service._disk.root, agent.key
        whole, lost = agent.saved, agent.saved.branches[0].refs[0]
    assert run_check() == (0, [])
    (root / "blocks" / f"{lost.name}.full").unlink()
    assert run_check("--repair") == (0, [])
    with running(tmp_path / "nodes", small_model) as service:
        kept = service.node.resources.table.get(key).saved
        assert kept == whole
        assert service.node.resources.store.blocks.missing(kept.kept_refs) == [lost]


def test_lost_block_of_a_branch_is_harmless(small_model, tmp_path):
    with running(tmp_path, small_model) as service:
        agent, history, _ = rewrite_twice(service)
        lost = {*agent.saved.branches[-1].refs}
        for ref in lost:
            (service._disk.root / "blocks" / f"{ref.name}.full").unlink()
            service.node.resources.store.blocks._index.drop(ref)
        call(service, ChangeSettings(*agent.key, None, closes=True), AgentView)
        assert take_turn(service, 3, history).admitted.match == "extend"
        assert not lost & {*agent.saved.kept_refs}


def test_branches_are_reused_beside_a_private_agent(small_model, tmp_path):
    with running(tmp_path, small_model) as service:
        agent, history, _ = rewrite_twice(service)
        ask(service, words(70, 100), agent="secret")
        call(service, ChangeSettings(TENANT, AgentId("secret"), None, is_private=True), AgentView)
        again = take_turn(service, 2, history)
        assert again.admitted.agent == agent.key[1]
        assert again.admitted.cached_tokens > again.admitted.prompt_tokens // 2
