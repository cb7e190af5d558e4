"""Agents as files between real nodes: the same bits return, and invalid files are refused."""

import asyncio
import itertools
import random
from dataclasses import replace

import httpx2
import pytest

from fabric.control.hibernation_calls import HIBERNATE_PATH, RESUME_PATH, Hibernate, Resume
from fabric.errors import CorruptDataError, RejectedError
from fabric.ids import AgentId, NodeName, TenantId
from fabric.record.hibernation_file import (
    FrameKind,
    FrameReader,
)
from fabric.record.manifest import OwnerState
from fabric.turn.generation import CacheTier, Delta
from node.runtime.identity import NodeIdentity
from tests.support.architectures import ARCHITECTURES
from tests.support.erasures import erase
from tests.support.forged_files import LIES, forged
from tests.support.hibernation import (
    BROUGHT_KEY,
    frame_ends,
    headers_of,
    hibernate,
    post,
    resume,
    trace_of,
)
from tests.support.on_loop import change
from tests.support.samples import sample
from tests.support.services import TENANT, ask, running
from tests.support.tiny_models import LLAMA, write_model

SYSTEM = {"role": "system", "content": "the cat sat on the mat and the dog sat on the log. " * 30}
HELLO = [SYSTEM, {"role": "user", "content": "naïve café 東京"}]
OTHER_FABRIC = b"z" * 32
OTHER_TENANT = TenantId("other")


def logprobs(service, messages, agent, epoch):
    """Run a turn; return its tokens with log probabilities, and the reply."""
    reply = ask(
        service, messages, agent=agent, epoch=epoch, max_tokens=6, logprobs=1, ignore_eos=True
    )
    entries = [e for event in reply.events if isinstance(event, Delta) for e in event.logprobs]
    assert len(entries) == 6
    return [(e.token, e.logprob) for e in entries], reply


@pytest.mark.parametrize("name", sample(["llama", "gpt_oss", "qwen3_5"], "gpt_oss"))
def test_hibernation_changes_no_bit(name, tmp_path):
    """Undisturbed, resumed beside, resumed in another fabric, restarted there: all equal."""
    model = str(write_model(tmp_path / name, ARCHITECTURES[name]))
    words = "the cat sat on the mat and the dog sat on the log. " * (8 if name == "qwen3_5" else 30)
    hello = [{"role": "system", "content": words}, *HELLO[1:]]
    with running(tmp_path, model, "here") as here:
        _, reply = logprobs(here, hello, "alice", 1)
        messages = [
            *hello,
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": "größer"},
        ]
        file, export_agent = hibernate(here, "alice"), hibernate(here, "alice", key=BROUGHT_KEY)
        assert resume(here, file, "bob")["blocks_reused"] > 0
        want, stayed = logprobs(here, messages, "alice", 1)
        erase(here, "alice", 1)  # otherwise bob shares the blocks that alice's turn just stored
        got, restored = logprobs(here, messages, "bob", 2)
        assert got == want
        assert stayed.admitted.cache is CacheTier.HOT
        assert restored.admitted.cache is CacheTier.DISK
        assert restored.admitted.cached_tokens == stayed.admitted.cached_tokens
    with running(tmp_path, model, "there", cluster_key=OTHER_FABRIC) as there:
        resumed = resume(there, export_agent, "carol", epoch=7, key=BROUGHT_KEY)
        assert (resumed["view"]["node"], resumed["view"]["epoch"]) == ("there", 7)
        assert resumed["blocks_reused"] == 0
        assert there.node.resources.store.blocks.check_integrity() == []
    with running(tmp_path, model, "there", cluster_key=OTHER_FABRIC) as there:
        got, restored = logprobs(there, messages, "carol", 7)
        assert got == want
        assert restored.admitted.cached_tokens == stayed.admitted.cached_tokens


# --- one pair of nodes for everything else ---------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "llama", LLAMA))


@pytest.fixture(scope="module")
def service(model, tmp_path_factory):
    with running(tmp_path_factory.mktemp("node"), model) as node_service:
        ask(node_service, HELLO, agent="alice", max_tokens=4)
        yield node_service


@pytest.fixture(scope="module")
def file(service):
    return hibernate(service, "alice")


@pytest.fixture(scope="module")
def export_agent(service):
    return hibernate(service, "alice", key=BROUGHT_KEY)


@pytest.fixture
def unchanged_node(service):
    """Check that the node is unchanged after the test."""
    before = trace_of(service)
    yield
    assert trace_of(service) == before
    assert before[2] == ()


def upload_file(service, raw, agent="back", epoch=2, key=None):
    """Feed a file as the HTTP side does, without its sockets; return the refusal's code."""
    arriving = service.node.moves.imports.begin(
        Resume(TENANT, AgentId(agent), epoch, signing_key=key)
    )
    try:
        arriving.feed(raw)
        arriving.finish()
    except RejectedError as error:
        return error.code
    finally:
        arriving.abandon()
    return None


def test_damage_anywhere_is_refused_and_changes_nothing(service, file, unchanged_node):
    assert upload_file(service, file) is None
    rng = random.Random(7)
    ends = [8, *frame_ends(file)]
    # Of each frame: kind, length, first and last byte of the body, signature.
    spots = {at + i for at in ends[:-1] for i in (0, 1, 4, 6, 8)}
    spots |= {at - i for at in ends[1:] for i in (1, 32, 33)}
    spots |= {rng.randrange(len(file)) for _ in range(60)}
    for at in sorted(spots):
        flipped = bytearray(file)
        flipped[at] ^= 1 << rng.randrange(8)
        assert upload_file(service, bytes(flipped)) is not None, at


def test_truncation_at_every_frame_is_refused_and_changes_nothing(service, file, unchanged_node):
    ends = [0, 8, *frame_ends(file)]
    for end in itertools.chain(ends[:-1], (end - 1 for end in ends[1:])):
        answer = resume(service, file[:end])
        assert answer["refused"] == "truncated_file", end
        assert answer["status"] == 400


def test_every_refusal_has_a_code_and_changes_nothing(
    service, file, export_agent, unchanged_node, tmp_path, model
):
    bad_key = b"x" * 32
    cases = [
        ("agent_exists", 409, lambda: resume(service, file, "alice", epoch=9)),
        ("stale_epoch", 409, lambda: resume(service, file, "alice", epoch=1, replace=True)),
        ("other_tenant", 409, lambda: resume(service, file, tenant=OTHER_TENANT)),
        ("key_required", 409, lambda: resume(service, export_agent)),
        ("wrong_key", 400, lambda: resume(service, export_agent, key=bad_key)),
        ("invalid_signing_key", 400, lambda: resume(service, export_agent, key=b"short")),
        ("not_a_hibernation_file", 400, lambda: resume(service, b"PK\3\4" + bytes(100))),
        ("unknown_version", 400, lambda: resume(service, b"MFHIBER9" + file[8:])),
        ("damaged_file", 400, lambda: resume(service, file + b"more than it")),
        ("truncated_file", 400, lambda: resume(service, b"")),
    ]
    for code, status, act in cases:
        answer = act()
        assert (answer["refused"], answer["status"]) == (code, status)
    other = str(write_model(tmp_path / "other", LLAMA, seed=5))
    with running(tmp_path, other, "elsewhere") as elsewhere:
        assert resume(elsewhere, file)["refused"] == "fingerprint_mismatch"
    with running(tmp_path, model, "foreign", cluster_key=OTHER_FABRIC) as foreign:
        assert resume(foreign, file)["refused"] == "wrong_key"
        assert trace_of(foreign)[:2] == (set(), 0)


def test_invalid_hibernate_requests_are_refused(service, unchanged_node):
    ghost = Hibernate(TENANT, AgentId("ghost"), 1)
    stale = Hibernate(TENANT, AgentId("alice"), 2)
    foreign = Hibernate(OTHER_TENANT, AgentId("alice"), 1)
    salted = Hibernate(TENANT, AgentId("alice"), 1, BROUGHT_KEY, b"s" * 65)
    statuses = [
        post(service, HIBERNATE_PATH, request, b"").status_code
        for request in (ghost, stale, foreign, salted)
    ]
    assert statuses == [404, 421, 404, 400]
    # Neither message is accepted at the other's path, and a stranger may send neither.
    assert post(service, HIBERNATE_PATH, Resume(TENANT, AgentId("a"), 1), b"").status_code == 400
    for path in (HIBERNATE_PATH, RESUME_PATH):
        assert httpx2.post(service.node.resources.endpoint.url + path).status_code == 401


def test_files_over_the_size_limits_are_refused(service, file, unchanged_node, monkeypatch):
    monkeypatch.setattr("node.http.hibernation.HIBERNATION_BYTES_MAX", len(file) - 1)
    assert resume(service, file)["refused"] == "too_large"
    monkeypatch.undo()
    tight = replace(service.node.resources.identity.settings, disk_bytes=1)
    monkeypatch.setattr(NodeIdentity, "settings", tight)
    assert upload_file(service, file) == "too_large"


def test_stalled_or_broken_upload_leaves_nothing(service, file, unchanged_node, monkeypatch):
    monkeypatch.setattr("node.http.hibernation.HIBERNATION_GRACE_S", 0.2)
    monkeypatch.setattr("node.http.hibernation.HIBERNATION_BYTES_PER_S_MIN", 1e9)

    async def slow():
        yield file[: len(file) // 2]
        await asyncio.sleep(0.6)

    async def upload():
        headers = headers_of(service, Resume(TENANT, AgentId("back"), 2))
        url = service.node.resources.endpoint.url + RESUME_PATH
        async with httpx2.AsyncClient(timeout=60) as client:
            return await client.post(url, content=slow(), headers=headers)

    got = asyncio.run(upload())
    assert got.json()["error"]["code"] == "upload_stalled"


# --- signed but inconsistent files -----------------------------------------------------------


@pytest.mark.parametrize("lie", LIES)
def test_signed_but_inconsistent_files_are_refused(lie, service, export_agent, unchanged_node):
    assert upload_file(service, forged(export_agent), key=BROUGHT_KEY) is None
    assert upload_file(service, forged(export_agent, number=0.5), key=BROUGHT_KEY) is None
    refused = upload_file(service, forged(export_agent, **LIES[lie]), key=BROUGHT_KEY)
    assert refused in ("damaged_file", "fingerprint_mismatch")


# --- concurrent work -------------------------------------------------------------------------


def on_loop(service, work):
    return asyncio.run_coroutine_threadsafe(work, service._loop).result(60)


def test_export_is_unaffected_by_later_turns_of_its_agent(service):
    ask(service, HELLO, agent="moving", max_tokens=4, tenant=OTHER_TENANT)
    want = hibernate(service, "moving", tenant=OTHER_TENANT)
    stored = service.node.resources.store.blocks.total_bytes
    export = service.node.moves.exports.begin(Hibernate(OTHER_TENANT, AgentId("moving"), 1))

    async def begin():
        await export.open()
        chunks = export.chunks()
        return chunks, await anext(chunks)

    async def finish():
        rest = [chunk async for chunk in chunks]
        await export.close()
        return rest

    chunks, first = on_loop(service, begin())
    ask(service, "something else altogether", agent="moving", tenant=OTHER_TENANT, max_tokens=2)
    got = b"".join([first, *on_loop(service, finish())])

    read = list(FrameReader(None).feed(got))
    assert [f.body for f in read if f.kind is FrameKind.BLOCK] == [
        f.body for f in FrameReader(None).feed(want) if f.kind is FrameKind.BLOCK
    ]
    assert service.node.resources.store.blocks.total_bytes < stored  # released at the end
    assert service.node.resources.store.blocks.check_integrity() == []
    # The file restores the earlier memory and replaces the agent's later state.
    back = resume(service, got, "moving", epoch=2, replace=True, tenant=OTHER_TENANT)
    again = ask(service, HELLO, agent="moving", epoch=2, max_tokens=4, tenant=OTHER_TENANT)
    assert back["view"]["epoch"] == 2
    assert again.admitted.cached_tokens == again.admitted.prompt_tokens - 1


def test_damaged_block_aborts_the_export(service, tmp_path):
    ask(service, "the dog sat on the log " * 40, agent="hurt", tenant=OTHER_TENANT, max_tokens=2)
    agent = service.node.resources.table.get((OTHER_TENANT, AgentId("hurt")))
    root = service._disk.root / "blocks"
    victim = root / f"{agent.saved.refs[-1].name}.full"
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    export = service.node.moves.exports.begin(Hibernate(OTHER_TENANT, AgentId("hurt"), 1))

    async def write():
        try:
            await export.open()
            return [chunk async for chunk in export.chunks()]
        finally:
            await export.close()

    with pytest.raises(CorruptDataError):
        on_loop(service, write())
    # Once the loss is known, the block is saved again from memory.
    got = post(service, HIBERNATE_PATH, Hibernate(OTHER_TENANT, AgentId("hurt"), 1), b"")
    assert got.status_code == 200
    assert len(list(FrameReader(None).feed(got.content))) > len(agent.saved.refs)
    assert service.node.resources.store.blocks.check_integrity() == []


def test_moving_agents_and_newer_replicas_are_not_replaced(service, file):
    ask(service, "one two three", agent="moved", max_tokens=2)
    agent = service.node.resources.table.get((TENANT, AgentId("moved")))
    sealed = replace(agent.manifest, state=OwnerState.SEALED, sealed_to=NodeName("b"))
    change(service, agent, manifest=sealed)
    request = Hibernate(TENANT, AgentId("moved"), 1)
    assert post(service, HIBERNATE_PATH, request, b"").status_code == 503
    assert (
        resume(service, file, "moved", epoch=9, replace=True)["refused"] == "migration_in_progress"
    )
    replica = replace(agent.manifest, state=OwnerState.REPLICA, sealed_to=None, epoch=4)
    change(service, agent, manifest=replica)
    assert resume(service, file, "moved", epoch=4)["refused"] == "stale_epoch"
    # An agent resumed above the replica's epoch replaces it.
    assert resume(service, file, "moved", epoch=6)["view"]["state"] == "owned"
