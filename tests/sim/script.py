"""A simulated fabric driven by a script, without chance and without clients of its own.

The script runs in the router's process and acts as a client does; it may access any host.
"""

import asyncio
import errno
import gc
from contextlib import contextmanager
from unittest import mock

from fabric.errors import FabricError, RetryLaterError
from fabric.ids import AgentId, OperationId, TenantId
from fabric.turn.generation import Delta, Finished, Identity, IdentityKind, Sampling
from node.store.posix_disk import DiskError
from router.prompt import chat_prompt
from router.turn_request import TurnRequest
from tests.sim import oracle, random_streams
from tests.sim.disk import SimDisk
from tests.sim.loop import SimLoop
from tests.sim.model import FULL, MODEL
from tests.sim.tokenizer import render
from tests.sim.world import World, _clean_up
from tests.support.conversations import read_messages

TENANT = TenantId("red")
UP_S = 4.0  # until router and nodes are connected
PATIENCE_S = 60.0
LIMIT_S = 3_000.0


def play(script, settings=None, seed=1):
    """Run a fabric by `script(world)`; return its result, raise its error or a violation."""
    gc.disable()
    loop = SimLoop()
    asyncio.set_event_loop(loop)
    world = World(seed, loop)
    world.kind, world.replicas, world.uses_http = FULL, 0, False
    world.moves_agents = False
    loop.start_worker = None
    for host in world.nodes.values():
        host._settings = settings or host._settings
    results = []

    async def live():
        for host in (*world.nodes.values(), world.router):
            host.boot()
        await asyncio.sleep(UP_S)
        running = loop.spawn(world.router.process, script(world))
        await asyncio.wait({running})
        results.append(running.result())

    loop.set_exception_handler(lambda _, context: world.fail(repr(context.get("exception"))))
    loop.on_step = world.invariants.check_step
    with random_streams.seeded_secrets(), world.taps():
        try:
            task = loop.create_task(live())
            task.add_done_callback(lambda _: loop.end())
            loop.call_later(LIMIT_S, world.fail, "the script does not end")
            loop.run_forever()
        finally:
            _clean_up(world, loop)
            gc.enable()
    assert world.violation is None, world.violation
    task.result()
    return results[0]


class Talk:
    """An agent's client, which extends its conversation and checks every answer."""

    def __init__(self, world, agent, system):
        self._world = world
        self._operations = 0
        self.key = TENANT, AgentId(agent)
        self.messages = [{"role": "system", "content": system}]
        self.durable_tokens = 0  # of the last turn that was acknowledged as durable
        self.last = None  # admission of the last turn

    async def say(self, text, max_tokens=8, sent=()):
        """Take a turn; return whether it is durable.

        `messages` are as the model reads them; `sent` has by number the text that the client sends
        of a message that directives edit.
        """
        self.messages.append({"role": "user", "content": text})
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        answer, finished = await self._read(sampling, sent)
        assert answer == oracle.answer(self.messages, sampling).text, "a wrong answer"
        self.messages.append({"role": "assistant", "content": answer})
        if finished.durable:
            self.durable_tokens = len(render(self.messages[:-1])) + len(answer)
        return finished.durable

    async def _read(self, sampling, sent=()):
        sent = dict(sent)
        self._operations += 1
        turn = TurnRequest(
            operation=OperationId(f"{self.key[1]}-{self._operations:08}"),
            tenant=TENANT,
            model=MODEL,
            identity=Identity(IdentityKind.AGENT, self.key[1]),
            sampling=sampling,
            prompt=chat_prompt(read_messages(self._sent(sent))),
        )
        answer, finished = "", None
        opened = await retry(lambda: self._world.router.services.turns.open(turn))
        self.last = opened.admitted
        async for event in opened.events():
            if isinstance(event, Delta):
                answer += event.text
            elif isinstance(event, Finished):
                finished = event
        assert finished is not None, "an answer ended without its last event"
        return answer, finished

    def _sent(self, sent):
        return [
            {**message, "content": sent.get(at, message["content"])}
            for at, message in enumerate(self.messages)
        ]


async def retry(call):
    """Repeat a call for as long as it fails with RetryLaterError."""
    waited_s = 0.0
    while True:
        try:
            return await call()
        except RetryLaterError as error:
            waited_s += error.retry_after_s
            if waited_s > PATIENCE_S:
                raise
            await asyncio.sleep(error.retry_after_s)


async def run_on_host(world, host, work):
    """Await work in a host's process."""
    task = world.loop.spawn(host.process, work)
    await asyncio.wait({task})
    return task.result()


async def refusal_of(call):
    """Await a call that may be refused; return the error, if it was."""
    try:
        await call
    except FabricError as error:
        return error
    return None


class InPlaceFault:
    """Publishes of one file on one drive that fail after their rename."""

    def __init__(self, drive, name, skip, *, permanent):
        self._drive = drive
        self._name = name
        self._skip = skip
        self._permanent = permanent  # every later attempt fails, too, removals included
        self._old = self._new = None
        self.hits = 0

    def publish(self, real, disk, name, parts):
        is_hit = self._is_hit(disk, [disk._root + name])
        if is_hit and self.hits == 1:
            self._old = self._drive.files.get(name)
            self._new = b"".join(bytes(part) for part in parts)
        real(disk, name, parts)
        if is_hit:
            raise _late_failure()

    def remove_all(self, real, disk, names):
        if self.hits and self._is_hit(disk, [disk._root + name for name in names]):
            raise _late_failure()
        return real(disk, names)

    def lose_power(self, *, finds_new):
        """End the fault; the drive holds the old or the new file, as after a power loss."""
        if self._permanent and self.hits:
            content = self._new if finds_new else self._old
            if content is None:
                self._drive.drop(self._name)
            else:
                self._drive.write(self._name, content)
        self._skip = None

    def _is_hit(self, disk, names):
        if disk._drive is not self._drive or self._name not in names or self._skip is None:
            return False
        if self._skip:
            self._skip -= 1
            return False
        self._skip = 0 if self._permanent else None
        self.hits += 1
        return True


def _refusal(cause):
    return DiskError("the drive refused", cause)


def _late_failure():
    failure = _refusal(errno.EIO)
    failure.is_in_place = True
    return failure


@contextmanager
def failing_in_place(drive, name, skip=0, *, permanent=False):
    """Fail a publish of `name` in place: the one after `skip` others, or all from there on."""
    fault = InPlaceFault(drive, name, skip, permanent=permanent)
    publish, remove_all = SimDisk.publish, SimDisk.remove_all

    def published(disk, name, parts):
        fault.publish(publish, disk, name, parts)

    def removed(disk, names):
        return fault.remove_all(remove_all, disk, names)

    with (
        mock.patch.object(SimDisk, "publish", published),
        mock.patch.object(SimDisk, "remove_all", removed),
    ):
        yield fault


@contextmanager
def full_for_records(drive):
    """Make one drive refuse every record, but accept blocks."""
    publish = SimDisk.publish

    def published(disk, name, parts):
        if disk._drive is drive and name.startswith("manifests/"):
            raise _refusal(errno.ENOSPC)
        publish(disk, name, parts)

    with mock.patch.object(SimDisk, "publish", published):
        yield
