import asyncio

from fabric.control.calls import CALLS, decode_reply, encode_call
from fabric.control.node_calls import AgentView, PinAgent
from fabric.ids import AgentId, TenantId
from node.control_calls import ControlCalls
from node.limits import CONTROL_CALLS_MAX, WAITING_CALLS_MAX
from tests.support.services import TENANT, ask, running
from tests.support.tiny_models import LLAMA, write_model

NAME, OTHER = AgentId("a"), TenantId("other")


def test_node_answers_every_control_call_and_no_others(tmp_path):
    with running(tmp_path / "a", write_model(tmp_path / "model", LLAMA)) as service:
        answered = ControlCalls(service.node).answered

    assert answered == {spec.message for spec in CALLS.values()}


def test_waiting_calls_of_one_tenant_leave_slots_for_heartbeats_and_others(tmp_path):
    """Ray runs a limited number of calls: a heartbeat without a slot would let a lease expire."""

    async def scenario(node):
        calls = ControlCalls(node)

        async def pinned(tenant):
            answer = await calls.answer(encode_call(PinAgent(tenant, NAME, pinned=True)))
            return decode_reply(AgentView, answer)

        async with node.resources.table.get((TENANT, NAME)).turn_lock:
            calls_in_flight = [
                asyncio.ensure_future(pinned(TENANT)) for _ in range(CONTROL_CALLS_MAX)
            ]
            another = await pinned(OTHER)
            refused = {each.result().status for each in calls_in_flight if each.done()}
            waiting = [each for each in calls_in_flight if not each.done()]
        return another, refused, len(waiting), await asyncio.gather(*waiting)

    with running(tmp_path / "a", write_model(tmp_path / "model", LLAMA)) as service:
        for tenant in (TENANT, OTHER):
            ask(service, "the cat sat", agent=NAME, tenant=tenant, max_tokens=1)
        work = asyncio.run_coroutine_threadsafe(scenario(service.node), service._loop)
        another, refused, count, views = work.result(60)

    assert another.pinned
    assert refused == {429}
    assert count == WAITING_CALLS_MAX // 2
    assert all(view.pinned for view in views)
