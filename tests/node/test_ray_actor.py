"""The node's actor without Ray: temporary failures are retried, permanent ones reported."""

import asyncio
import errno
import shutil
import threading
import time

import pytest

from fabric.codec import pack
from fabric.control.calls import ErrorReply, decode_reply, encode_call
from fabric.control.node_calls import Describe, Done, NodeView, Restart, Stop
from fabric.settings import NodeSettings
from node import ray_actor
from node.background_loop import BackOff
from node.keys import read_keys
from node.ray_actor import NodeActor, NodeStart, next_incarnation
from node.store.model_folders import ModelFolders
from node.store.posix_disk import PosixDisk
from tests.support.failing_disk import WRITES, FailingCalls
from tests.support.keys import make_keys
from tests.support.services import KEY, running
from tests.support.small_node import SMALL
from tests.support.tiny_models import write_model

SETTINGS = NodeSettings(durability="none")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "small", SMALL))


@pytest.fixture(autouse=True)
def retry_soon(monkeypatch):
    monkeypatch.setattr(ray_actor, "START_RETRY_S", 0.01)
    monkeypatch.setattr(ray_actor, "START_RETRY_MAX_S", 0.1)
    monkeypatch.setattr(ray_actor, "LASTING_RETRY_S", 0.3)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "fabric"
    make_keys(folder, KEY)
    return read_keys(folder)


@pytest.fixture
def start(tmp_path, keys):
    def started(model):
        folder = str(tmp_path / "node-a")
        key_arguments = str(keys.folder), keys.digest
        return NodeActor(
            pack(NodeStart("node-a", folder, model, "127.0.0.1", *key_arguments, SETTINGS))
        )

    return started


def ask(actor, call=None, kind=NodeView):
    raw = asyncio.run(actor.control(encode_call(call or Describe())))
    return decode_reply(kind, raw)


def until(actor, holds):
    for _ in range(6_000):
        reply = ask(actor)
        if holds(reply):
            return reply
        time.sleep(0.01)
    return pytest.fail(f"nothing happened for a minute: {reply}")


def engines():
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


@pytest.mark.parametrize("trouble", ["locked by the one before", "full"])
def test_start_failing_temporarily_is_retried(model, tmp_path, monkeypatch, start, trouble):
    with running(tmp_path, model):
        pass
    before = len(engines())
    faults = FailingCalls(errno.ENOSPC, ("open",)).install(monkeypatch)
    [folder] = ModelFolders(tmp_path / "node-a", "").list_all()
    old = PosixDisk(tmp_path / "node-a" / folder.name, "none")
    if trouble == "full":
        faults.is_broken = True
    else:
        old.claim()
    actor = start(model)
    refused = until(actor, lambda reply: "again" in getattr(reply, "message", ""))
    assert (refused.status, refused.code) == (503, "loading")
    faults.mend()
    old.close()
    view = until(actor, lambda reply: isinstance(reply, NodeView))
    assert view.self_test.passed
    assert len(engines()) == before + 1, "a failed start leaves nothing running"
    ask(actor, Stop(), Done)


def test_restart_saves_all_and_ends_the_process(model, start, monkeypatch):
    ended = asyncio.Event()
    monkeypatch.setattr(ray_actor, "_end_process", ended.set)
    monkeypatch.setattr(ray_actor, "RESTART_REPLY_S", 0.01)
    actor = start(model)
    until(actor, lambda reply: isinstance(reply, NodeView))

    async def restarted():
        raw = await actor.control(encode_call(Restart(0.0)))
        after = await actor.control(encode_call(Describe()))
        async with asyncio.timeout(60):
            await ended.wait()
        return decode_reply(Done, raw), decode_reply(NodeView, after)

    done, refused = asyncio.run(restarted())
    assert done.detail == "0 agents are durable"
    assert (refused.status, refused.code) == (503, "stopping")


def test_start_with_bad_settings_is_retried_with_backoff_until_mended(
    model, tmp_path, start, caplog
):
    before = len(engines())
    later = tmp_path / "later"
    actor = start(str(later))
    until(actor, lambda _: len(logged_waits(caplog)) > 1)
    failed = until(actor, lambda reply: reply.code == "start_failed")
    assert isinstance(failed, ErrorReply)
    assert str(later) in failed.message
    assert logged_waits(caplog)[:2] == ["0.3 s", "0.6 s"]
    assert 0.0 <= failed.retry_after_s <= float(logged_waits(caplog)[-1].removesuffix(" s"))
    later.symlink_to(model)
    view = until(actor, lambda reply: isinstance(reply, NodeView))
    assert view.self_test.passed
    assert len(engines()) == before + 1, "failed starts leave nothing running"
    ask(actor, Stop(), Done)


def logged_waits(caplog):
    messages = [each.getMessage() for each in caplog.records]
    return [text.rpartition("retrying in ")[2] for text in messages if "did not start" in text]


def test_retry_waits_double_up_to_a_limit():
    waits = BackOff(first_s=5.0, longest_s=30.0)
    assert [waits.next_s() for _ in range(5)] == [5.0, 10.0, 20.0, 30.0, 30.0]


def test_incarnations_stay_unique_on_a_full_drive(tmp_path, monkeypatch):
    folder = tmp_path / "node-a"
    first = next_incarnation(folder)
    second = next_incarnation(folder)
    assert second > first
    faults = FailingCalls(errno.ENOSPC, WRITES).install(monkeypatch)
    faults.is_broken = True
    others = [next_incarnation(folder) for _ in range(2)]
    faults.mend()
    last = next_incarnation(folder)
    assert min(others) > second
    assert len({first, second, *others, last}) == 5


def test_incarnations_stay_unique_in_a_restored_folder(tmp_path):
    folder = tmp_path / "node-a"
    first = next_incarnation(folder)
    shutil.copytree(folder, tmp_path / "copy")
    second = next_incarnation(folder)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "copy", folder)
    assert len({first, second, next_incarnation(folder)}) == 3
