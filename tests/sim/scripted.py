"""Base of scripted lives: the simulated fabric without chaos and without clients."""

import asyncio
from dataclasses import replace

from fabric.ids import AgentId, OperationId, TenantId
from fabric.settings import NodeSettings
from fabric.turn.generation import Delta, Finished, Identity, IdentityKind, Sampling
from router.prompt import chat_prompt
from router.turn_request import TurnRequest
from tests.sim.model import KINDS, MODEL
from tests.sim.world import MIB, World, run
from tests.support.conversations import read_messages

TENANT = TenantId("red")
SETTINGS = NodeSettings(hot_bytes=MIB, disk_bytes=64 * MIB)
STARTED_S = 4.0
FILLER = "river stone amber cloud lantern meadow harbor quiet copper " * 5


class Script(World):
    """A world whose life is `script(world)`; `result` is its return value."""

    def __init__(self, seed, loop, script, kind, settings, *, has_standby=False):
        self._script, self._kind, self._settings = script, kind, settings
        self.result = None
        super().__init__(seed, loop, has_standby=has_standby)

    def __post_init__(self):
        super().__post_init__()
        self.kind = KINDS[self._kind]
        self.settings = self._settings
        self.uses_http, self.replicas, self.is_slow = True, 0, False
        self.counts_nodes, self.device_failure_chance, self.is_low_on_memory = True, 0.0, False
        self.moves_agents = False
        for host in self.nodes.values():
            host._settings = replace(self._settings)
        self._operations = 0

    async def live(self):
        for host in (*self.nodes.values(), self.router):
            host.boot()
        await asyncio.sleep(STARTED_S)
        self.result = await self._script(self)

    # --- helpers of scripts ------------------------------------------------------------------

    def spawn_on(self, host, work):
        """Start work in a host's process."""
        return self.loop.spawn(host.process, work)

    async def run_on_host(self, host, work):
        """Await work in a host's process."""
        return await self.spawn_on(host, work)

    def turn(self, agent, messages, max_tokens=8):
        """Return the request of a turn of an agent."""
        self._operations += 1
        return TurnRequest(
            operation=OperationId(f"op-{self._operations:012}"),
            tenant=TENANT,
            model=MODEL,
            identity=Identity(IdentityKind.AGENT, AgentId(agent)),
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
            prompt=chat_prompt(read_messages(messages)),
        )

    async def ask(self, agent, messages, max_tokens=8):
        """Take a turn; return its admission, the answer, and the last event."""

        async def ask():
            turn = self.turn(agent, messages, max_tokens)
            opened = await self.router.services.turns.open(turn)
            text, finished = "", None
            try:
                async for event in opened.events():
                    if isinstance(event, Delta):
                        text += event.text
                    elif isinstance(event, Finished):
                        finished = event
            finally:
                await opened.close()
            return opened.admitted, text, finished

        return await self.run_on_host(self.router, ask())

    async def move(self, agent, to):
        """Move an agent."""
        work = self.router.services.moves.migrate(TENANT, AgentId(agent), to)
        return await self.run_on_host(self.router, work)

    async def erase(self, agent):
        """Erase an agent."""
        work = self.router.services.erasures.erase(TENANT, AgentId(agent))
        return await self.run_on_host(self.router, work)

    def words_on(self, host, word):
        """List the files of a disk that contain a word, as text or as tokens."""
        forms = (word.encode(), b"".join(ord(char).to_bytes(4, "little") for char in word))
        return [name for name, raw in host.drive.files.items() if any(f in raw for f in forms)]


def begin(word):
    """Return the first messages of a conversation, with a word in the user's."""
    return [
        {"role": "system", "content": f"You are of help. {FILLER}"},
        {"role": "user", "content": f"{word} {FILLER}"},
    ]


def play(script, *, kind="full", settings=SETTINGS, seed=1, has_standby=False):
    """Run a scripted life; return the world, or fail with its violation."""

    def make(seed, loop):
        return Script(seed, loop, script, kind, settings, has_standby=has_standby)

    world = run(seed, make)
    assert world.violation is None, world.violation
    return world
