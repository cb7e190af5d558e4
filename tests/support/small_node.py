"""A small node with agents of one size, for tests of retention."""

import asyncio

from fabric.control.node_calls import AgentList, ListAgents
from node.tiers.disk_budget import record_bytes
from tests.support.services import TENANT, ask, call, running
from tests.support.tiny_models import LLAMA

SMALL = {**LLAMA, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
WORDS = "the cat sat on the mat and the dog sat on the log. " * 10
BRIEF = {"max_tokens": 2, "ignore_eos": True}
DAY_S = 24 * 3600.0


def talk(service, number, tenant=TENANT, name="a", **options):
    """Take a turn whose prompt shares no prefix with others."""
    agent, text = f"{name}-{number}", f"{name} {number} {WORDS}"
    return ask(service, text, agent=agent, tenant=tenant, **BRIEF, **options)


def agent_bytes_in(folder, model):
    """Return the bytes that one agent of `talk` takes on disk."""
    with running(folder, model) as service:
        talk(service, 0)
        agent = service.node.resources.table.get((TENANT, "a-0"))
        return service.node.resources.store.blocks.total_bytes + record_bytes(agent.saved)


def on_loop(service, work):
    return asyncio.run_coroutine_threadsafe(work, service._loop).result(60)


def stored(service, tenant=TENANT):
    """Return the names of a tenant's agents on disk."""
    listed = call(service, ListAgents(), AgentList).agents
    return {a.view.agent for a in listed if "disk" in a.view.tiers and a.view.tenant == tenant}


def age(service, seconds):
    """Add idle time to every agent."""
    times = service.node.resources.table.use._seen
    for key, (used_s, steady_s) in times.items():
        times[key] = (used_s, steady_s - seconds)


def check(service, budget_bytes):
    blocks = service.node.resources.store.blocks
    assert blocks.check_integrity() == []
    records = sum(
        record_bytes(agent.saved) for agent in service.node.resources.table if agent.saved
    )
    assert blocks.total_bytes + records <= budget_bytes
