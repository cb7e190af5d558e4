"""The router's Mac: processes that store only the roster, and the control plane to nodes."""

import asyncio

from fabric.ids import NodeName
from fabric.keys import http_secret
from fabric.settings import RouterSettings
from router.fleet.fleet import NodeAccess
from router.fleet.node_client import NodeLink, NodeLostError
from router.fleet.node_roster import NodeRoster
from router.fleet.term_keeper import TermKeeper
from router.fleet.terms import SOLE_ROUTER, RouterTerms
from router.moves.hibernations import Hibernations
from router.services import assemble
from tests.sim.clock import SimClock
from tests.sim.connection import SimSession
from tests.sim.loop import Process
from tests.sim.node_host import CLUSTER_KEY
from tests.sim.transfers import once

ROUTER = "router"


class SimRosterStore:
    """The roster on the router's disk; a write happens at once or not at all."""

    def __init__(self):
        self._roster = NodeRoster()

    def read(self):
        return self._roster

    async def write(self, roster):
        self._roster = roster
        return True


class RouterHost:
    """The router's Mac, and its current process if it has one."""

    def __init__(self, world, name=ROUTER):
        self.name = name
        self.incarnation = 0
        self.process: Process | None = None
        self.services = None
        self._world = world
        self._connections = []
        self.roster_store = SimRosterStore()
        self.keeper = None  # of its term, if it may have a standby

    @property
    def host(self):
        """The host that clients reach."""
        return self

    @property
    def hosts(self):
        return (self,)

    @property
    def is_serving(self):
        return self.services is not None

    def boot(self):
        """Start a process of a new incarnation."""
        assert self.process is None or self.process.is_dead, "one process at a time"
        self.incarnation = self._world.next_router_life(self)
        name = f"{self.name}#{self.incarnation}"
        self.process = Process(name, self._world.stream(name))
        self._running = self._world.loop.spawn(self.process, self._run())

    async def stop_cleanly(self):
        """Stop as an operator does: moves and copies under way are aborted first."""
        process = self.process
        self._running.cancel()
        await asyncio.wait({self._running}, timeout=5.0)
        if self.process is process:
            self.kill()

    def kill(self):
        if self.process.is_dead:
            return
        self.process.is_dead = True
        self._world.dead_processes.append((self.process, self.services))
        self.services = self.keeper = None
        self._world.note(f"the {self.name} dies")
        self._world.watch.on_trouble(ROUTER)
        for response in self._connections:
            response.requests.break_off()
        self._connections.clear()
        self._world.clients.on_router_death(self.process)
        self._world.chaos.boot_later(self)

    def freeze(self):
        self._world.watch.on_trouble(ROUTER)
        self.process.is_frozen = True

    def thaw(self):
        self._world.loop.thaw(self.process)

    async def _run(self):
        world = self._world
        session = SimSession(world, self._connections, self.name)

        async def roster():
            listed = [node for node in world.nodes.values() if node.is_listed]
            return {NodeName(node.name): _Transport(world, node, self.name) for node in listed}

        def connect(name, transport, is_lost):
            uses_http = world.uses_http
            return NodeLink(
                name, transport, session, secret, is_lost, uses_http=uses_http, terms=terms
            )

        secret = http_secret(CLUSTER_KEY)
        clock = SimClock(world.loop, 1e6 * self.incarnation)
        self.keeper = self._keeper(clock) if world.has_standby else None
        terms = self.keeper or SOLE_ROUTER
        access = NodeAccess(roster, connect, clock, terms=terms)
        count = len(world.nodes) if world.counts_nodes else 0
        settings = RouterSettings(
            replicas=world.replicas, nodes_expected=count, moves_idle_agents=world.moves_agents
        )
        self.services = assemble(access, settings, CLUSTER_KEY, roster_store=self.roster_store)
        self.hibernations = Hibernations(self.services.fleet, self.services.moves)
        world.note(f"the {self.name} serves as incarnation {self.incarnation}")
        await self.services.run()

    def _keeper(self, clock):
        terms = RouterTerms(self.process.name, len(self._world.nodes))
        terms.url = f"http://{self.name}"
        return TermKeeper(terms, clock.monotonic_s, self.process.random.random)


class _Transport:
    """Control calls to one node; a message lost on the way is never reported."""

    def __init__(self, world, host, router):
        self._world = world
        self._host = host
        self._router = router

    async def __call__(self, raw):
        network, loop = self._world.network, self._world.loop
        answered = loop.create_future()

        def settle(reply):
            if not answered.done():
                answered.set_result(reply)

        def fail():
            if not answered.done():
                message = f"{self._host.name} may not have received the call"
                answered.set_exception(NodeLostError(message, self._host.name))

        def reply_with(data):
            network.post(self._host.name, self._router, lambda: settle(data), fail)

        def report_death():
            network.post(self._host.name, self._router, fail, fail)

        def arrive():  # once for each copy of the message
            self._host.receive(raw, once(reply_with), report_death)

        network.post(self._router, self._host.name, arrive, fail)
        return await answered
