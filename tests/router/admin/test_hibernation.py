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


class Keeper(FakeNode):
    """A fake node that answers with a file, or takes one as it comes."""

    def __init__(self, name, **options):
        super().__init__(name, **options)
        self.asked = []
        self.received = 0
        self.refuses_after = None
        self.during = None
        self.is_undecided = False
        self.more_routes = {HIBERNATE_PATH: self._hibernate, RESUME_PATH: self._resume}

    async def _hibernate(self, request):
        call = decode_header(Hibernate, request.headers[CALL_HEADER])
        self.asked.append(call)
        memory = self.memory[call.tenant, call.agent]
        if memory.epoch != call.epoch:
            return _error(421, "stale_epoch")
        return web.Response(body=b"the file", headers={EPOCH_HEADER: str(memory.epoch)})

    async def _resume(self, request):
        call = decode_header(Resume, request.headers[CALL_HEADER])
        self.asked.append(call)
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


def keepers(*names, **options):
    return [Keeper(name, **options) for name in names]


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


async def test_hibernate_asks_the_owner_and_passes_its_file_on():
    async with rig(nodes=keepers("node-a", "node-b")) as made:
        http = made.http()
        owner = (await made.chat("hello", agent="alice")).headers["x-macfabric-node"]
        headers = {"x-macfabric-signing-key": SIGNING_KEY, "x-macfabric-signing-salt": "0102"}
        got = await http.post("/v1/agents/alice/hibernate", headers=headers)
        missing = await http.post("/v1/agents/bob/hibernate")
        call = made[owner].asked[0]
        told = [e.event for e in made.fleet.events._kept if isinstance(e.event, AgentHibernated)]

    assert told == [AgentHibernated(("default", "alice"), owner)]
    assert (got.status_code, got.content) == (200, b"the file")
    assert got.headers["content-length"] == "8"
    assert got.headers["x-macfabric-epoch"] == "1"
    assert got.headers["x-macfabric-node"] == owner
    assert call == Hibernate("default", "alice", 1, bytes.fromhex(SIGNING_KEY), b"\1\2")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "unknown_agent"


async def test_hibernate_learns_a_later_epoch():
    async with rig(nodes=keepers("node-a"), tended=False) as made:
        await made.chat("hello", agent="alice")
        made["node-a"].memory["default", "alice"].epoch = 5
        got = await made.http().post("/v1/agents/alice/hibernate")

    assert got.headers["x-macfabric-epoch"] == "5"


async def test_resume_takes_an_epoch_above_all_known():
    async with rig(nodes=keepers("node-a", "node-b")) as made:
        http = made.http()
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


async def test_a_replaced_owner_elsewhere_steps_down():
    async with rig(nodes=keepers("node-a", "node-b")) as made:
        owner = (await made.chat("hello", agent="alice")).headers["x-macfabric-node"]
        target = "node-b" if owner == "node-a" else "node-a"
        path = f"/v1/agents/alice/resume?node={target}&replace=1"
        got = await made.http().post(path, content=file_of(epoch=1))
        old = made[owner].memory["default", "alice"]
        next_turn = await made.chat("hello", "x", "more", agent="alice")

    assert (got.json()["node"], got.json()["epoch"]) == (target, 2)
    assert (old.state, old.epoch) == (OwnerState.REPLICA, 2)
    assert next_turn.headers["x-macfabric-node"] == target


async def test_an_undecided_replacement_leaves_the_agent_where_it_was():
    """Her turn finds her there; a file replaces her only if told to, as if she were owned."""
    async with rig(nodes=keepers("node-a", "node-b"), tended=False) as made:
        http = made.http()
        said = "hello " * 200
        owner = (await made.chat(said, agent="alice")).headers["x-macfabric-node"]
        target = "node-b" if owner == "node-a" else "node-a"
        made[target].is_undecided = True
        path = f"/v1/agents/alice/resume?node={target}"
        failed = await http.post(f"{path}&replace=1", content=file_of(epoch=1))
        assert made[owner].memory["default", "alice"].state is OwnerState.REPLICA
        made[target].is_undecided = False
        again = await http.post(path, content=file_of(epoch=1))
        found = await made.chat(said, "x", "more", agent="alice")
        replaced = await http.post(f"{path}&replace=1", content=file_of(epoch=1))

    assert failed.json()["error"]["code"] == UNDECIDED
    assert (again.status_code, again.json()["error"]["code"]) == (409, "agent_exists")
    assert found.headers["x-macfabric-node"] == owner
    assert found.headers["x-macfabric-match"] == "extend"
    assert replaced.status_code == 200


async def test_a_file_that_may_have_been_taken_leaves_nobody_below_it():
    """Also where the owner is not reached: a restart of the other node may find that it owns it."""
    async with rig(nodes=keepers("node-a", "node-b")) as made:
        owner = (await made.chat("hello", agent="alice")).headers["x-macfabric-node"]
        target = "node-b" if owner == "node-a" else "node-a"
        made[target].is_undecided = True
        made[owner].does.fail["release_agent"] = FabricError("the disk refused")
        path = f"/v1/agents/alice/resume?node={target}&replace=1"
        got = await made.http().post(path, content=file_of(epoch=3))
        after = await made.chat("hello", "x", "more", agent="alice")

    assert (got.status_code, got.json()["error"]["code"]) == (507, UNDECIDED)
    assert made[target].asked[0].epoch == 4
    assert after.headers["x-macfabric-node"] == owner
    assert int(after.headers["x-macfabric-epoch"]) > 4


async def test_a_turn_during_an_upload_goes_where_the_agent_will_be():
    async with rig(nodes=keepers("node-a", "node-b")) as made:
        answers = []

        async def speak():
            answers.append(await made.chat("hello", agent="alice"))

        for node in made.nodes.values():
            node.during = speak
        await made.http().post("/v1/agents/alice/resume?node=node-b", content=file_of())
        reservation = made.fleet.directory.reservation(("default", "alice"))

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
async def test_refused_before_any_node_is_asked(path, body, headers, status, code):
    async with rig(nodes=keepers("node-a"), tended=False) as made:
        got = await made.http().post(f"/v1/agents/{path}", content=body, headers=headers)
        asked = made["node-a"].asked

    error = got.json()["error"]
    assert (got.status_code, error["code"]) == (status, code)
    assert error["type"] == "invalid_request_error"
    assert asked == []


async def test_files_pass_the_body_limit_and_an_early_refusal_stops_them():
    size = BODY_BYTES_MAX + (1 << 20)
    big = file_of(blocks=(bytes(size),))
    async with rig(nodes=keepers("node-a"), tended=False) as made:
        http = made.http()
        whole = await http.post("/v1/agents/alice/resume", content=big)
        made["node-a"].received, made["node-a"].refuses_after = 0, 100_000
        refused = await http.post("/v1/agents/bob/resume", content=big)
        received = made["node-a"].received
        elsewhere = await http.post("/v1/agents/bob/migrate", content=big)

    assert whole.json()["bytes_received"] == len(big)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "agent_exists")
    assert received < len(big) // 2
    assert elsewhere.status_code == 413


async def test_a_client_that_goes_away_leaves_nothing_reserved():
    async def part():
        yield file_of()[:300]
        await asyncio.sleep(30)

    async with rig(nodes=keepers("node-a"), tended=False) as made:
        sending = asyncio.create_task(made.http().post("/v1/agents/alice/resume", content=part()))
        await until(lambda: made["node-a"].received > 0)
        assert made.fleet.directory.reservation(("default", "alice")) is not None
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: made.fleet.directory.reservation(("default", "alice")) is None)
        listed = (await made.http().get("/v1/agents")).json()["data"]

    assert listed == []


async def test_tenants_have_names_of_their_own():
    settings = RouterSettings(api_keys={"one": KEY, "two": OTHER_KEY}, takeover_after_s=0.3)
    async with rig(nodes=keepers("node-a"), settings=settings, tended=False) as made:
        one, two = made.http(KEY), made.http(OTHER_KEY)
        await made.chat("hello", agent="alice", http=one)
        theirs = await two.post("/v1/agents/alice/hibernate")
        came = await two.post("/v1/agents/alice/resume", content=file_of())
        call = made["node-a"].asked[-1]

    assert theirs.status_code == 404
    assert (came.status_code, call.tenant) == (200, "two")
