import pytest

from router.events import LinkMeasured, MemoryChanged
from tests.router.rig import rig, until
from tests.router.test_links import CABLE, LAN, B, link

pytestmark = pytest.mark.anyio


async def test_link_rate_is_published_when_measured_or_changed():
    async with rig("ab", tended=False) as fabric:
        fleet = fabric.fleet

        async def measured(*links):
            fabric["node-a"].view_changes = {"links": links}
            seen = fleet.events._count
            await fleet.membership.refresh()
            new = [each.event for each in fleet.events._kept if each.number > seen]
            return [event for event in new if isinstance(event, LinkMeasured)]

        first = await measured(
            link(B, LAN, reachable=True, bytes_per_s=1e8),
            link(B, CABLE, reachable=True, bytes_per_s=1e9, rtt_s=0.001),
        )
        alike = await measured(
            link(B, LAN, reachable=True, bytes_per_s=1.05e8),
            link(B, CABLE, reachable=True, bytes_per_s=0.95e9),
        )
        slower = await measured(link(B, LAN, reachable=True, bytes_per_s=0.8e8))
        unmeasured = await measured(link(B, LAN, reachable=True), link(B, CABLE, reachable=False))
        again = await measured(link(B, LAN, reachable=True, bytes_per_s=0.8e8))

    assert first == [
        LinkMeasured("node-a", B, LAN.kind, 1e8, None),
        LinkMeasured("node-a", B, CABLE.kind, 1e9, 0.001),
    ]
    assert alike == unmeasured == []
    assert [event.bytes_per_s for event in slower] == [0.8e8]
    assert again == slower


async def test_memory_pressure_is_published_when_it_changes():
    async with rig("a", tended=False) as fabric:
        fleet = fabric.fleet

        async def memory_events(pressure, limit_bytes):
            fabric["node-a"].view_changes = {
                "memory_pressure": pressure,
                "hot_limit_bytes": limit_bytes,
                "hot_total_bytes": 800,
            }
            seen = fleet.events._count
            await fleet.membership.refresh()
            return [
                event
                for each in fleet.events._kept
                if each.number > seen and (event := each.event).name == "node.memory"
            ]

        usual = await memory_events("normal", 800)
        begun = await memory_events("warning", 700)
        alike = await memory_events("warning", 700)
        ended = await memory_events("normal", 800)

    assert usual == alike == []
    assert begun == [MemoryChanged("node-a", "warning", 700, 800)]
    assert ended == [MemoryChanged("node-a", "normal", 800, 800)]


async def test_each_node_state_is_published_once():
    async with rig("a") as fabric:
        await until(lambda: fabric.fleet.events._count > 0)
        for _ in range(5):
            await fabric.fleet.membership.refresh()
        events = [
            each.event for each in fabric.fleet.events._kept if each.event.name == "node.state"
        ]

    assert [event.state for event in events][-1] == "ready"
    assert len({event.state for event in events}) == len(events)
