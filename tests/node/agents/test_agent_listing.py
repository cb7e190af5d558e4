"""A node's list of agents: complete, by changes, and in pages that a router joins."""

import pytest

from fabric.codec import pack
from fabric.control.agent_at import AgentName
from fabric.control.node_calls import ListAgents
from fabric.hosting.clock import SystemClock
from fabric.ids import AgentId, Fingerprint, NodeName, TenantId
from node.agents import agent_listing, agent_table
from node.agents.agent_table import AgentTable

TENANT = TenantId("t")


class Listing:
    """A node's agent table, and the list that a router builds from its pages."""

    def __init__(self, count=0):
        self.table = AgentTable(NodeName("a"), Fingerprint(b"f" * 32), SystemClock())
        self.incarnation = 7
        self.known_epochs: dict[str, int] = {}
        self.next_page = (0, 0)
        for index in range(count):
            self.add(index)

    def add(self, index):
        self.table.create(TENANT, AgentId(f"agent-{index}"), None, 1)

    def change(self, index):
        self.table.put(self.get(index))

    def remove(self, index):
        self.table.remove(self.get(index).key)

    def get(self, index):
        return self.table.get((TENANT, AgentId(f"agent-{index}")))

    def fetch_page(self):
        """Request one page and apply it."""
        page = agent_listing.list_agents(
            NodeName("a"), self.incarnation, self.table, ListAgents(*self.next_page)
        )
        if not page.since:
            self.known_epochs.clear()
        for name in page.gone:
            self.known_epochs.pop(name.agent, None)
        for item in page.agents:
            self.known_epochs[item.view.agent] = item.view.epoch
        self.next_page = (page.incarnation, page.changes)
        return page

    def is_in_sync(self):
        return set(self.known_epochs) == {a.manifest.agent for a in self.table}


def test_listing_contains_only_changed_agents():
    listing = Listing(count=50)
    assert len(listing.fetch_page().agents) == 50
    assert listing.is_in_sync()

    listing.change(3)
    listing.add(50)
    listing.remove(4)
    page = listing.fetch_page()

    assert [item.view.agent for item in page.agents] == ["agent-3", "agent-50"]
    assert page.gone == (AgentName(TENANT, AgentId("agent-4")),)
    assert listing.is_in_sync()
    assert listing.fetch_page().agents == ()


def test_recreated_agent_is_not_listed_as_gone():
    listing = Listing(count=2)
    listing.fetch_page()
    listing.remove(0)
    listing.add(0)
    page = listing.fetch_page()

    assert page.gone == ()
    assert listing.is_in_sync()


def test_restart_or_lost_removal_causes_full_listing(monkeypatch):
    monkeypatch.setattr(agent_table, "GONE_AGENTS_MAX", 4)
    listing = Listing(count=20)
    listing.fetch_page()
    for index in range(5):
        listing.remove(index)
    page = listing.fetch_page()
    assert page.since == 0
    assert listing.is_in_sync()

    listing.remove(5)
    assert listing.fetch_page().since > 0
    assert listing.is_in_sync()

    listing.next_page = (6, listing.next_page[1])
    assert listing.fetch_page().since == 0
    listing.next_page = (7, 1 << 40)
    assert listing.fetch_page().since == 0
    assert listing.is_in_sync()


def test_long_listing_is_paged_and_includes_concurrent_changes(monkeypatch):
    monkeypatch.setattr(agent_listing, "LIST_BYTES_MAX", 10 * 512)
    listing = Listing(count=35)
    first = listing.fetch_page()
    assert len(first.agents) == 10
    assert first.more

    listing.change(2)  # listed already
    listing.change(30)  # not yet
    listing.remove(1)
    listing.remove(31)
    listing.add(99)
    pages = 1
    while listing.fetch_page().more:
        pages += 1

    assert pages <= 4
    assert listing.is_in_sync()


@pytest.mark.parametrize("pieces", [60, 8_192])
def test_listing_after_turn_contains_only_the_agent_that_ran(pieces, monkeypatch):
    """A complete list of 10,000 agents with 60 pieces each is 9 MB."""
    count = 10_000 if pieces == 60 else 40
    listing = Listing(count=count)
    sketch = tuple((1 << 63) + piece for piece in range(pieces))
    for agent in listing.table:
        object.__setattr__(agent.manifest, "sketch", sketch)
    whole_bytes = page_bytes = 0
    more = True
    while more:
        page = listing.fetch_page()
        page_bytes = max(page_bytes, len(pack(page)))
        whole_bytes += len(pack(page))
        more = page.more
    listing.change(17)
    page = listing.fetch_page()
    print(
        f"\n{count} agents: {whole_bytes:,} bytes in all, a page {page_bytes:,}, "
        f"after one turn {len(pack(page)):,}"
    )

    assert listing.is_in_sync()
    assert page_bytes < 6 << 20
    assert len(page.agents) == 1
    assert len(pack(page)) < 1_024 + 10 * pieces
