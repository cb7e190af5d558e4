"""The router's part of hibernation: the node, the epoch, and early refusals."""

import asyncio

import pytest
from aiohttp import web

from fabric.codec import to_plain
from fabric.control.hibernation_calls import (
    CALL_HEADER,
    EPOCH_HEADER,
    HIBERNATE_PATH,
    RESUME_PATH,
    Hibernate,
    Resume,
    Resumed,
    decode_header,
)
from fabric.errors import UNDECIDED, FabricError
from fabric.ids import AgentId, Fingerprint, TenantId
from fabric.limits import BODY_BYTES_MAX
from fabric.record.hibernation_file import MAGIC, HibernationHeader, SignedWith, encode_file, key_id
from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from router.events import AgentHibernated
from tests.router.fake_memory import Memory
from tests.router.fake_node import FakeNode
from tests.router.rig import KEY, OTHER_KEY, rig, until

pytestmark = pytest.mark.anyio
SIGNING_KEY = "ab" * 32


class HibernationNode(FakeNode):
    """A fake node that sends a hibernation file, or receives one in parts."""

    def __init__(self, name, **options):
        super().__init__(name, **options)
        self.node_calls = []
        self.received = 0
        self.refuses_after = None
        self.during = None
        self.is_undecided = False
        self.more_routes = {HIBERNATE_PATH: self._hibernate, RESUME_PATH: self._resume}

    async def _hibernate(self, request):
        call = decode_header(Hibernate, request.headers[CALL_HEADER])
        self.node_calls.append(call)
        memory = self.memory[call.tenant, call.agent]
        if memory.epoch != call.epoch:
            return _error(421, "stale_epoch")
        return web.Response(body=b"the file", headers={EPOCH_HEADER: str(memory.epoch)})

    async def _resume(self, request):
        call = decode_header(Resume, request.headers[CALL_HEADER])
        self.node_calls.append(call)
        async for part in request.content.iter_any():
            self.received += len(part)
            if self.refuses_after is not None and self.received >= self.refuses_after:
                return _error(409, "agent_exists")
        if self.is_undecided:
            return _error(507, UNDECIDED)
        if self.during is not None:
            await self.during()
        memory = Memory(call.tenant, call.agent, call.epoch, text="from a file", hot=False)
        self.memory[memory.key] = memory
        self.changes += 1
        return web.json_response(to_plain(Resumed(self.agent_view(memory), 3, 1, self.received)))


def _error(status, code):
    body = {"status": status, "code": code, "message": "no", "retry_after_s": None, "param": None}
    return web.json_response({"error": body}, status=status)


def hibernation_nodes(*names, **options):
    return [HibernationNode(name, **options) for name in names]


def file_of(agent="alice", epoch=3, fingerprint=b"\xff" * 32, blocks=(b"b" * 100,)):
    header = HibernationHeader(
        signed_with=SignedWith.FABRIC,
        key_id=key_id(b"k" * 32),
        salt=b"",
        tenant=TenantId("default"),
        agent=AgentId(agent),
        fingerprint=Fingerprint(fingerprint),
        model="echo",
        epoch=epoch,
        revision=1,
        tokens_count=2,
        blocks_count=len(blocks),
        record_bytes=6,
        payload_bytes=sum(map(len, blocks)),
        created_s=1.0,
    )
    return b"".join(encode_file(header, b"record", map(memoryview, blocks), b"k" * 32))


async def test_hibernate_streams_file_from_owner():
    async with rig(nodes=hibernation_nodes("node-a", "node-b")) as fabric:
        http = fabric.http()
        owner = (await fabric.chat("hello", agent="alice")).headers["x-macfabric-node"]
        headers = {"x-macfabric-signing-key": SIGNING_KEY, "x-macfabric-signing-salt": "0102"}
        response = await http.post("/v1/agents/alice/hibernate", headers=headers)
        missing = await http.post("/v1/agents/bob/hibernate")
        call = fabric[owner].node_calls[0]
        events = [
            e.event for e in fabric.fleet.events._kept if isinstance(e.event, AgentHibernated)
        ]

    assert events == [AgentHibernated(("default", "alice"), owner)]
    assert (response.status_code, response.content) == (200, b"the file")
    assert response.headers["content-length"] == "8"
    assert response.headers["x-macfabric-epoch"] == "1"
    assert response.headers["x-macfabric-node"] == owner
    assert call == Hibernate("default", "alice", 1, bytes.fromhex(SIGNING_KEY), b"\1\2")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "unknown_agent"


async def test_hibernate_adopts_later_epoch_of_node():
    async with rig(nodes=hibernation_nodes("node-a"), tended=False) as fabric:
        await fabric.chat("hello", agent="alice")
        fabric["node-a"].memory["default", "alice"].epoch = 5
        response = await fabric.http().post("/v1/agents/alice/hibernate")

    assert response.headers["x-macfabric-epoch"] == "5"


async def test_resume_uses_epoch_above_all_known_ones():
    async with rig(nodes=hibernation_nodes("node-a", "node-b")) as fabric:
        http = fabric.http()
        first = await http.post("/v1/agents/alice/resume", content=file_of(epoch=3))
        again = await http.post("/v1/agents/alice/resume", content=file_of(epoch=3))
        over = await http.post("/v1/agents/alice/resume?replace=true", content=file_of(epoch=1))
        other = await http.post("/v1/agents/bob/resume?node=node-b", content=file_of())
        shown = (await http.get("/v1/agents/alice")).json()

    assert first.json() == {
        "id": "alice", "object": "agent.resumed", "node": "node-a", "epoch": 4, "tokens": 11,
        "model": "echo", "blocks_received": 3, "blocks_reused": 1,
        "bytes_received": len(file_of(epoch=3)),
    }  # fmt: skip
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "agent_exists"
    assert over.json()["epoch"] == 5
    assert (other.json()["node"], other.json()["epoch"]) == ("node-b", 4)
    assert (shown["owner"], shown["epoch"]) == ("node-a", 5)


async def test_resume_with_replace_demotes_previous_owner_to_replica():
    async with rig(nodes=hibernation_nodes("node-a", "node-b")) as fabric:
        owner = (await fabric.chat("hello", agent="alice")).headers["x-macfabric-node"]
        target = "node-b" if owner == "node-a" else "node-a"
        path = f"/v1/agents/alice/resume?node={target}&replace=1"
        response = await fabric.http().post(path, content=file_of(epoch=1))
        old = fabric[owner].memory["default", "alice"]
        next_turn = await fabric.chat("hello", "x", "more", agent="alice")

    assert (response.json()["node"], response.json()["epoch"]) == (target, 2)
    assert (old.state, old.epoch) == (OwnerState.REPLICA, 2)
    assert next_turn.headers["x-macfabric-node"] == target


async def test_undecided_replacement_keeps_agent_on_its_node():
    """The next turn goes to that node; a file replaces the agent only with `replace`."""
    async with rig(nodes=hibernation_nodes("node-a", "node-b"), tended=False) as fabric:
        http = fabric.http()
        prompt = "hello " * 200
        owner = (await fabric.chat(prompt, agent="alice")).headers["x-macfabric-node"]
        target = "node-b" if owner == "node-a" else "node-a"
        fabric[target].is_undecided = True
        path = f"/v1/agents/alice/resume?node={target}"
        failed = await http.post(f"{path}&replace=1", content=file_of(epoch=1))
        assert fabric[owner].memory["default", "alice"].state is OwnerState.REPLICA
        fabric[target].is_undecided = False
        again = await http.post(path, content=file_of(epoch=1))
        found = await fabric.chat(prompt, "x", "more", agent="alice")
        replaced = await http.post(f"{path}&replace=1", content=file_of(epoch=1))

    assert failed.json()["error"]["code"] == UNDECIDED
    assert (again.status_code, again.json()["error"]["code"]) == (409, "agent_exists")
    assert found.headers["x-macfabric-node"] == owner
    assert found.headers["x-macfabric-match"] == "extend"
    assert replaced.status_code == 200


async def test_undecided_resume_raises_epoch_of_surviving_owner():
    """This holds for unreachable owners, too: the other node may own the agent after a restart."""
    async with rig(nodes=hibernation_nodes("node-a", "node-b")) as fabric:
        owner = (await fabric.chat("hello", agent="alice")).headers["x-macfabric-node"]
        target = "node-b" if owner == "node-a" else "node-a"
        fabric[target].is_undecided = True
        fabric[owner].behaviour.fail["release_agent"] = FabricError("the disk refused")
        path = f"/v1/agents/alice/resume?node={target}&replace=1"
        response = await fabric.http().post(path, content=file_of(epoch=3))
        after = await fabric.chat("hello", "x", "more", agent="alice")

    assert (response.status_code, response.json()["error"]["code"]) == (507, UNDECIDED)
    assert fabric[target].node_calls[0].epoch == 4
    assert after.headers["x-macfabric-node"] == owner
    assert int(after.headers["x-macfabric-epoch"]) > 4


async def test_turn_during_upload_is_routed_to_resume_target():
    async with rig(nodes=hibernation_nodes("node-a", "node-b")) as fabric:
        answers = []

        async def speak():
            answers.append(await fabric.chat("hello", agent="alice"))

        for node in fabric.nodes.values():
            node.during = speak
        await fabric.http().post("/v1/agents/alice/resume?node=node-b", content=file_of())
        reservation = fabric.fleet.directory.reservation(("default", "alice"))

    assert answers[0].headers["x-macfabric-node"] == "node-b"
    assert answers[0].headers["x-macfabric-epoch"] == "4"
    assert reservation is None


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "code"),
    [
        ("alice/resume", b"", {}, 400, "not_a_hibernation_file"),
        ("alice/resume", MAGIC, {}, 400, "truncated_file"),
        ("alice/resume", b"x" * 9000, {}, 400, "not_a_hibernation_file"),
        ("alice/resume", MAGIC + b"\1\0\0\0\0\x20\0\0" + bytes(9000), {}, 400, "damaged_file"),
        ("a%20b/resume", file_of(), {}, 400, "invalid_agent_id"),
        ("alice/resume?node=nowhere", file_of(), {}, 404, "unknown_node"),
        ("alice/resume?replace=maybe", file_of(), {}, 400, "invalid_value"),
        ("alice/resume", file_of(fingerprint=bytes(32)), {}, 409, "fingerprint_mismatch"),
        ("alice/resume", file_of(), {"x-macfabric-signing-key": "zz"}, 400, "invalid_signing_key"),
        ("alice/hibernate", b"", {"x-macfabric-signing-key": "ab"}, 400, "invalid_signing_key"),
        ("alice/hibernate", b"", {"x-macfabric-signing-salt": "no"}, 400, "invalid_signing_key"),
    ],
)  # fmt: skip
async def test_invalid_request_is_rejected_before_reaching_a_node(
    path, body, headers, status, code
):
    async with rig(nodes=hibernation_nodes("node-a"), tended=False) as fabric:
        response = await fabric.http().post(f"/v1/agents/{path}", content=body, headers=headers)
        calls = fabric["node-a"].node_calls

    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert error["type"] == "invalid_request_error"
    assert calls == []


async def test_resume_file_may_exceed_body_limit_and_early_refusal_stops_upload():
    size = BODY_BYTES_MAX + (1 << 20)
    big = file_of(blocks=(bytes(size),))
    async with rig(nodes=hibernation_nodes("node-a"), tended=False) as fabric:
        http = fabric.http()
        whole = await http.post("/v1/agents/alice/resume", content=big)
        fabric["node-a"].received, fabric["node-a"].refuses_after = 0, 100_000
        refused = await http.post("/v1/agents/bob/resume", content=big)
        received = fabric["node-a"].received
        elsewhere = await http.post("/v1/agents/bob/migrate", content=big)

    assert whole.json()["bytes_received"] == len(big)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "agent_exists")
    assert received < len(big) // 2
    assert elsewhere.status_code == 413


async def test_disconnected_upload_releases_reservation():
    async def part():
        yield file_of()[:300]
        await asyncio.sleep(30)

    async with rig(nodes=hibernation_nodes("node-a"), tended=False) as fabric:
        sending = asyncio.create_task(fabric.http().post("/v1/agents/alice/resume", content=part()))
        await until(lambda: fabric["node-a"].received > 0)
        assert fabric.fleet.directory.reservation(("default", "alice")) is not None
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: fabric.fleet.directory.reservation(("default", "alice")) is None)
        listed = (await fabric.http().get("/v1/agents")).json()["data"]

    assert listed == []


async def test_agent_names_are_scoped_by_tenant():
    settings = RouterSettings(api_keys={"one": KEY, "two": OTHER_KEY}, takeover_after_s=0.3)
    async with rig(nodes=hibernation_nodes("node-a"), settings=settings, tended=False) as fabric:
        one, two = fabric.http(KEY), fabric.http(OTHER_KEY)
        await fabric.chat("hello", agent="alice", http=one)
        theirs = await two.post("/v1/agents/alice/hibernate")
        resumed = await two.post("/v1/agents/alice/resume", content=file_of())
        call = fabric["node-a"].node_calls[-1]

    assert theirs.status_code == 404
    assert (resumed.status_code, call.tenant) == (200, "two")
