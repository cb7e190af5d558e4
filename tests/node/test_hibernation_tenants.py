"""Files of several tenants: none reads another's or takes all slots of a node."""

import asyncio

import aiohttp
import pytest

from fabric.control.hibernation_calls import RESUME_PATH, Resume
from fabric.control.node_calls import AgentList, ListAgents
from fabric.ids import AgentId, TenantId
from node.limits import HIBERNATIONS_MAX
from tests.support.hibernation import BROUGHT_KEY, frame_ends, headers_of, hibernate, resume
from tests.support.services import TENANT, ask, call, running
from tests.support.tiny_models import LLAMA, write_model

OTHER_TENANT = TenantId("other")
HELLO = [{"role": "user", "content": "the cat sat on the mat. " * 60}]


@pytest.mark.nightly
def test_slow_uploads_of_one_tenant_leave_slots_for_others(tmp_path, monkeypatch):
    model = str(write_model(tmp_path / "llama", LLAMA))
    with running(tmp_path, model) as service:
        ask(service, HELLO, agent="alice", max_tokens=4)
        file = hibernate(service, "alice")
        refused, mine, theirs, slow = _flood(service, file, monkeypatch)

    assert len(slow) == HIBERNATIONS_MAX // 2
    assert {*refused, mine} == {(429, "overloaded")}
    assert theirs[0] == 409, "the upload was admitted, but the file is another tenant's"
    assert slow == [(408, "upload_stalled")] * len(slow)


def _flood(service, file, monkeypatch):
    """Upload more files slowly than there are slots, and whole files of both tenants meanwhile."""
    monkeypatch.setattr("node.http.hibernation.HIBERNATION_GRACE_S", 8.0)
    monkeypatch.setattr("node.http.hibernation.HIBERNATION_BYTES_PER_S_MIN", 1e9)

    async def drip():
        for byte in file:
            yield bytes([byte])
            await asyncio.sleep(0.05)

    async def flood():
        async with aiohttp.ClientSession() as client:  # a client that reads early replies

            async def upload(name, tenant=TENANT, content=None):
                headers = headers_of(service, Resume(tenant, AgentId(name), 2))
                url = service.node.resources.endpoint.url + RESUME_PATH
                async with client.post(url, data=content or drip(), headers=headers) as response:
                    return response.status, (await response.json())["error"]["code"]

            uploads = [asyncio.create_task(upload(f"drip-{i}")) for i in range(HIBERNATIONS_MAX)]
            refused, going = set(), set(uploads)
            while len(refused) < HIBERNATIONS_MAX // 2:
                done, going = await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
                refused |= done
            mine = await upload("late", content=file)
            theirs = await upload("late", OTHER_TENANT, content=file)
            return [t.result() for t in refused], mine, theirs, await asyncio.gather(*going)

    return asyncio.run(asyncio.wait_for(flood(), 60))


def test_resumed_agent_is_visible_to_its_own_tenant_only(tmp_path):
    model = str(write_model(tmp_path / "llama", LLAMA))
    stranger = TenantId("stranger")
    with running(tmp_path, model) as service:
        ask(service, HELLO, agent="alice", max_tokens=4)
        leaving = hibernate(service, "alice", key=BROUGHT_KEY)
        resume(service, leaving, "mine", key=BROUGHT_KEY, tenant=stranger)
        listed = call(service, ListAgents(), AgentList).agents
        mine = [item.view for item in listed if item.view.agent == "mine"]
        cold = ask(service, HELLO, agent="fresh", max_tokens=2, tenant=TenantId("third"))
        shared = ask(service, HELLO, agent="fresh", max_tokens=2, tenant=stranger)

    assert [view.tenant for view in mine] == [stranger]
    assert cold.admitted.cached_tokens == 0
    assert shared.admitted.cached_tokens >= 256
    assert b"default" not in leaving[: next(frame_ends(leaving))]
