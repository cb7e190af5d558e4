"""A turn's id, from its request to its agent's history, which only its tenant can read."""

import pytest

from fabric.ids import TurnId
from fabric.settings import RouterSettings
from router.turn_request import TurnRequest
from router.turns.attempts import Attempt
from router.turns.owner_wait import AwaitedNodes
from tests.router.rig import KEY, OPERATOR_KEY, OTHER_KEY, rig
from tests.router.sse_reader import following
from tests.support.clocks import ManualClock

pytestmark = pytest.mark.anyio
TENANTS = RouterSettings(
    api_keys={"one": KEY, "two": OTHER_KEY}, loopback_without_key=False, takeover_after_s=20.0
)
NAME = "5f0c2b1e-aaaa-bbbb-cccc-0123456789ab"


async def turns_of(http, agent, query=""):
    answer = await http.get(f"/v1/agents/{agent}/turns{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


async def test_one_id_names_the_turn_everywhere(caplog):
    caplog.set_level("INFO", "macfabric.router.turns")
    async with rig("a") as fabric:
        http = fabric.http()
        async with following(http) as events:
            await events.until("snapshot")
            http.headers["x-request-id"] = NAME
            answer = await fabric.chat("hello there", agent="mira", http=http)
            read = await events.until("turn.ended")
        (turn,) = await turns_of(fabric.http(), "mira")
        decided = (await fabric.http().get("/v1/placement/decisions")).json()["data"][0]
        sent = fabric["node-a"].requests[-1]

    assert answer.headers.get_list("x-request-id") == [NAME]
    assert answer.headers.get_list("request-id") == [NAME]
    assert sent.turn.id == NAME
    began, ended = (next(e for e in read if e.name == f"turn.{how}") for how in ("began", "ended"))
    assert {began.data["turn"], ended.data["turn"], turn["id"], decided["turn"]} == {NAME}
    assert turn["object"] == "agent.turn"
    assert turn["times"]["prefill_s"] == ended.data["times"]["prefill_s"] == 1.0
    assert decided["times"]["decode_s"] == 2.0
    assert any(line.startswith("agent ") and "decode 2.000 s" in line for line in caplog.messages)


@pytest.mark.parametrize("given", ["short", "a b c d e f g", "x" * 65, "", "-begins-with-a-dash"])
async def test_invalid_request_id_is_replaced(given):
    async with rig("a") as fabric:
        http = fabric.http()
        http.headers["x-request-id"] = given
        answer = await fabric.chat("hello", agent="mira", http=http)
        (turn,) = await turns_of(fabric.http(), "mira")
    assert turn["id"].startswith("req_")
    assert answer.headers["x-request-id"] == turn["id"]


async def test_repeated_request_id_header_is_replaced():
    async with rig("a") as fabric:
        headers = [("x-request-id", NAME), ("x-request-id", f"{NAME}-2")]
        answer = await fabric.http().get("/healthz", headers=headers)
    assert answer.headers["x-request-id"].startswith("req_")


async def test_history_is_the_tenants_own():
    async with rig("ab", settings=TENANTS) as fabric:
        await fabric.chat("hello there", agent="mira", http=fabric.http(KEY, operates=False))
        one, two = (fabric.http(key, operates=False) for key in (KEY, OTHER_KEY))
        path = "/v1/agents/mira/turns"
        other = await two.get(path)
        named = await two.get(f"{path}?tenant=one")
        keyless = await fabric.http(operates=False).get(path)
        own = await turns_of(one, "mira", "?tenant=one")

    assert (other.status_code, other.json()["error"]["code"]) == (404, "unknown_agent")
    assert (named.status_code, named.json()["error"]["code"]) == (403, "operator_required")
    assert keyless.status_code == 401
    assert len(own) == 1


async def test_operator_sees_the_history_of_a_tenants_agent():
    async with rig("ab", settings=TENANTS) as fabric:
        await fabric.chat("hello there", agent="mira", http=fabric.http(KEY, operates=False))
        http = fabric.http(OPERATOR_KEY, operates=False)
        unnamed = await http.get("/v1/agents/mira/turns")
        of_two = await http.get("/v1/agents/mira/turns?tenant=two")
        (turn,) = await turns_of(http, "mira", "?tenant=one")
        invalid = await http.get("/v1/agents/mira/turns?tenant=a%20b")

    assert (unnamed.status_code, unnamed.json()["error"]["code"]) == (403, "tenant_required")
    assert of_two.status_code == 404
    assert invalid.status_code == 400
    assert turn["outcome"] == "stop"


async def test_history_moves_with_its_agent_newest_first_and_ends_with_it():
    async with rig("ab") as fabric:
        http = fabric.http()
        home = (await fabric.chat("hello", agent="mira")).headers["x-macfabric-node"]
        other = ({"node-a", "node-b"} - {home}).pop()
        moved = await http.post("/v1/agents/mira/migrate", json={"to": other})
        assert moved.status_code == 200
        await fabric.chat("hello", "hello", "again", agent="mira")
        both = await turns_of(http, "mira")
        page = (await http.get("/v1/agents/mira/turns?limit=1")).json()
        refused = await http.get("/v1/agents/mira/turns?limit=0")
        await http.delete("/v1/agents/mira")
        gone = await http.get("/v1/agents/mira/turns")

    assert [turn["node"] for turn in both] == [other, home]
    assert [turn["not_hot"] for turn in both] == [
        f"it had moved here from {home}",
        "nothing of it was stored",
    ]
    assert both[0]["at_s"] >= both[1]["at_s"]
    assert (page["data"], page["has_more"]) == (both[:1], True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")
    assert gone.status_code == 404


async def test_node_of_an_earlier_version_gets_no_tag_and_has_no_history():
    async with rig("a") as fabric:
        node = fabric["node-a"]
        node.view_changes = {"build": None}
        node._handlers = {
            kind: answer for kind, answer in node._handlers.items() if kind.__name__ != "ReadTurns"
        }
        await fabric.fleet.membership.refresh()
        answer = await fabric.chat("hello", agent="mira")
        assert await turns_of(fabric.http(), "mira") == []
        assert answer.status_code == 200
        assert node.requests[-1].turn is None


async def test_ids_of_choices_are_those_of_their_request():
    async with rig("a") as fabric:
        answer = await fabric.chat("hello there", agent="mira", n=2)
        tags = {request.turn.id for request in fabric["node-a"].requests}
    assert tags == {answer.headers["x-request-id"]}


def test_tag_has_the_waiting_times_of_a_turn():
    clock = ManualClock()
    turn = TurnRequest(*([None] * 6), id=TurnId(NAME))
    attempt = Attempt(clock.now_s, AwaitedNodes(), moved_s=2.0)
    clock.now_s += 5.0
    tag = attempt.tag(turn, clock)
    assert (tag.id, tag.queue_s, tag.move_s) == (NAME, 3.0, 2.0)
    assert tag.began_s == clock.wall_s() - 5.0
