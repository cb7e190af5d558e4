"""Clients of several tenants that continue, change, abort and erase conversations.

Every answer is compared with the oracle's. Acknowledgements are recorded, and so are all attempts,
since a failed attempt may have been saved all the same.
"""

import asyncio
from dataclasses import dataclass, field

from fabric.edit_mode import EditMode
from fabric.errors import FabricError, NotFoundError
from fabric.ids import AgentId, OperationId, TenantId
from fabric.turn.generation import (
    Delta,
    Finished,
    FinishReason,
    Identity,
    IdentityKind,
    Sampling,
)
from router.prompt import chat_prompt
from router.turn_request import TurnRequest
from tests.sim import oracle
from tests.sim.epochs import reported_epochs
from tests.sim.model import END, MODEL
from tests.sim.reuse_judge import ANSWER_TOKENS_MAX, Attempt
from tests.sim.talk import WORDS, Talk
from tests.support.conversations import read_messages

TENANTS = (TenantId("red"), TenantId("blue"))
ROUNDS = 4
RHYTHM_S = 5.0
ERASED_ODDS = 0.1
PATIENCE_S = 120.0  # late messages and failed actions included
ALLOWED_STATUS = {409, 421, 429, 503}


class HungUpError(Exception):
    """Raised when a client hangs up in mid-answer."""


class Clients:
    """All conversations of one run."""

    def __init__(self, world):
        self._world = world
        self._calls = {}  # a dict, which keeps their order
        self.talks = []
        self.answered_count = 0
        self.answered_s = 0.0  # time of the last answer
        self.errors = {}
        self._erasing = set()  # agents
        self.erased = []  # (name, word that must no longer be stored anywhere)

    async def run(self):
        world = self._world
        random = world.stream("clients")
        shared = {tenant: " ".join(random.choices(WORDS, k=48)) for tenant in TENANTS}
        for number in range(world.talks_count):
            tenant = TENANTS[number % len(TENANTS)]
            kind = random.choice([IdentityKind.AGENT] * 3 + [IdentityKind.GROUP, "content"])
            if number == 0 and world.has_twin:
                kind = IdentityKind.AGENT
            agent = AgentId(f"{kind}-{number // 2}")
            if kind is IdentityKind.GROUP:
                agent = AgentId("team")
            identity = Identity(kind, agent)
            if kind == "content":
                identity = Identity(IdentityKind.CONTENT)
            talk = Talk(tenant, identity, world.stream(f"talk {number}"), number)
            talk.messages = [
                {"role": "system", "content": shared[tenant]},
                {"role": "user", "content": talk.say()},
            ]
            self.talks.append(talk)
        if world.has_twin:
            self._add_twin(self.talks[0])
        await asyncio.gather(*(self._talk(talk) for talk in self.talks))

    def _add_twin(self, talk):
        """Add another client that uses the same name at the same time."""
        number = len(self.talks)
        twin = Talk(talk.tenant, talk.identity, self._world.stream("twin"), number)
        twin.messages = [talk.messages[0], {"role": "user", "content": twin.say()}]
        twin.is_shared = talk.is_shared = True
        self.talks.append(twin)

    async def _talk(self, talk):
        begins_s = 4.0 * talk.random.random()
        await asyncio.sleep(2.0 + (0.0 if self._world.is_crowded else begins_s))
        directing = self._world.directing
        for _ in range(ROUNDS + self._world.edits.rounds(talk) + directing.rounds(talk)):
            if not await self._round(talk):
                return
            await self._world.lending.act(talk)
            await directing.act(talk)
            await asyncio.sleep(self._pause_s(talk))
            is_named = talk.acked is not None and talk.identity.kind is IdentityKind.AGENT
            is_due = is_named and talk.random.random() < ERASED_ODDS
            if is_due or (is_named and self._world.lending.is_due(talk)):
                await directing.end(talk)
                await self.erase(talk)
        await directing.end(talk)

    def _pause_s(self, talk):
        """Return a client's pause before its next turn; in some lives all return at once."""
        if not self._world.is_rhythmic:
            return talk.random.expovariate(1 / 3.0)
        return RHYTHM_S - self._world.loop.now_s % RHYTHM_S

    async def _round(self, talk):
        world, random = self._world, talk.random
        if random.random() < 0.15 and len(talk.messages) > 2:
            keep = random.randrange(2, len(talk.messages) + 1)
            keep -= keep > 2 and talk.messages[keep - 1]["role"] == "assistant"
            talk.messages = talk.messages[:keep]
            if random.random() < 0.5:  # another branch, not just a shorter one
                talk.messages = [*talk.messages[:-1], {"role": "user", "content": talk.say()}]
        if talk.messages[-1]["role"] == "assistant":
            talk.messages = [*talk.messages, {"role": "user", "content": talk.say()}]
        world.lending.prepare(talk)
        world.edits.edit(talk)
        world.directing.prepare(talk)
        world.readers.prepare(talk)
        sampled = random.random() < 0.4
        sampling = Sampling(
            max_tokens=ANSWER_TOKENS_MAX if world.is_slow else random.choice([3, 8, 24]),
            temperature=float(sampled),
            seed=random.randrange(1000) if sampled else None,
            ignore_eos=world.is_slow,
        )
        hang_up_after = random.randrange(8) if random.random() < 0.15 else None
        if not await self.take_turn(talk, sampling, hang_up_after):
            return False
        copycat = world.edits.copycat(talk)
        return copycat is None or await self.take_turn(copycat, sampling)

    async def take_turn(self, talk, sampling, hang_up_after=None, patience_s=PATIENCE_S):
        """Send a turn until it is answered; fail the run where that takes too long."""
        world = self._world
        patience_s *= 1 + world.is_slow  # answers of many seconds, in a queue
        deadline_s = world.loop.now_s + patience_s
        while world.loop.now_s < deadline_s:
            try:
                await self._attempt(talk, sampling, hang_up_after)
            except FabricError as error:
                self._note_error(talk, error)
                await asyncio.sleep(0.5 + 0.5 * talk.random.random())
            except HungUpError:
                world.note(f"{talk.name}: hangs up")
                hang_up_after = None
                # The turn was served until the client hung up.
                deadline_s = world.loop.now_s + patience_s
                await asyncio.sleep(talk.random.random())
            else:
                return True
        world.fail(f"{talk.name}: no answer for {patience_s:g} s")
        return False

    async def _attempt(self, talk, sampling, hang_up_after):
        world = self._world
        router, judge = world.router.host, world.directing.judge
        variants = judge.variants(talk, sampling)
        epochs_by_agent = reported_epochs(router, world.nodes, talk.tenant)
        edits = EditMode.FORGET if judge.may_forget(talk) else talk.edits
        prompts = [each.prompt for each in variants]
        may_keep = talk.edits is not EditMode.FORGET
        talk.attempts.append(Attempt(prompts[0], edits, tuple(prompts[1:]), may_keep))
        text, admitted, count = "", None, 0
        waiting_turn = None
        if world.reuse_judge.is_judged(talk):
            acked = talk.acked
            waiting_turn = world.owner_wait_judge.watch_turn(
                talk.key, acked.node, acked.epoch, talk.messages
            )
        call = self._send(router, talk, sampling)
        try:
            while True:
                event = await call.outbox.get()
                if isinstance(event, FabricError):
                    raise event
                if isinstance(event, Finished):
                    break
                if isinstance(event, Delta):
                    text += event.text
                    count += 1
                    is_plain = talk.edits is EditMode.FORGET and len(variants) == 1
                    is_plain &= not world.directing.directs(talk)
                    is_plain &= not judge.is_lost(talk, admitted.node)
                    is_plain &= "restored spelling" not in admitted.match_reason
                    if is_plain and not variants[0].expected.text.startswith(text):
                        world.fail(f"{talk.name}: got {text!r}, not {variants[0].expected.text!r}")
                        return
                else:
                    admitted, reported_epoch = event, epochs_by_agent.get(event.agent, 0)
                    world.watch.on_admitted(talk.tenant, event, router)
                    world.reuse_judge.check_admitted(talk, event)
                    world.owner_wait_judge.check_admitted(waiting_turn, event)
                    judge.check_admitted(talk, event, variants)
                    floor = talk.epochs.floor(event.agent, router.incarnation, reported_epoch)
                    if event.epoch < floor and not talk.may_be_erased:
                        world.fail(
                            f"{talk.name}: {event.node} serves at epoch {event.epoch},"
                            f" after epoch {floor}"
                        )
                if count == hang_up_after and admitted:
                    raise HungUpError
        finally:
            call.task.cancel()
            self._calls.pop(call, None)
        world.watch.check_fence(talk, admitted, call.operation, router)
        answer = oracle.Expected(text, event.reason, event.completion_tokens)
        if explained := judge.check_answer(talk, admitted, sampling, answer, variants):
            talk.epochs.note(admitted.agent, router.incarnation, admitted.epoch)
            self._finish(talk, explained, text, event, admitted, call.operation)

    def _finish(self, talk, variants, text, finished, admitted, operation):
        world = self._world
        self.answered_count += 1
        self.answered_s = world.loop.now_s
        talk.messages = [*talk.messages, {"role": "assistant", "content": text}]
        world.note(
            f"{talk.name}: answered by {admitted.node} at epoch {admitted.epoch},"
            f" {admitted.cached_tokens} of {admitted.prompt_tokens} {admitted.cache}"
            f" ({admitted.amortized_tokens} amortized)"
        )
        if finished.durable:
            key = (talk.tenant, admitted.agent)
            end = world.watch.find_end(operation, admitted)
            if not (talk.is_shared or talk.may_be_erased):
                texts = [each.prompt + text for each in variants]
                world.disk_judge.check_acknowledged(talk, key, texts, end[1])
            kept = text + chr(END) * (finished.reason is FinishReason.STOP)
            talk.acked = world.reuse_judge.ack(key, variants[0].prompt, kept, end, admitted)
            talk.attempts = []
            world.directing.judge.note_durable(talk, end, variants)

    async def take_last_turns(self):
        """Take one more turn of every client, which must be answered."""
        for talk in self.talks:
            if talk.messages[-1]["role"] == "assistant":
                talk.messages = [*talk.messages, {"role": "user", "content": "bye"}]
            await self.take_turn(talk, Sampling(max_tokens=4), patience_s=20.0)

    async def erase(self, talk):
        """Erase an agent, and check the receipts."""
        world = self._world
        services = world.router.services
        if services is None or world.router.process.is_frozen:
            return
        began_s = world.loop.now_s
        world.directing.verbs.forget(talk.key)  # regardless of the outcome
        series, derived = world.lineage.begin_series(talk.key), world.lineage.derived()
        begun_count, is_alone = world.lineage.begun_count, not self._erasing
        self._erasing.add(talk.key)
        task = world.loop.spawn(
            world.router.process, services.erasures.erase(talk.tenant, talk.identity.agent)
        )
        done, _ = await asyncio.wait({task}, timeout=60)
        talk.may_be_erased = not done or self._world.network.is_bad
        if not done or task.cancelled():
            return  # it may still be under way
        self._erasing.discard(talk.key)
        try:
            erasure = task.result()
        except NotFoundError as error:
            self._note_error(talk, error)
            self._check_unknown(talk)
            return
        except FabricError as error:
            self._note_error(talk, error)
            talk.may_be_erased = True
            return
        world.note(f"{talk.name}: erased, {erasure.unreachable} not reached")
        world.disk_judge.check_receipts(talk.key, erasure)
        if is_alone and world.lineage.begun_count == begun_count:
            for receipt in erasure.receipts:  # else another erasure may count shared rows
                world.lineage.check_receipt(talk.key, derived, receipt)
        if not (erasure.unreachable or talk.is_shared):
            world.lineage.revoke(talk.key, series, is_erased=True)
        is_noted = any(receipt.tombstone is not None for receipt in erasure.receipts)
        if is_noted and not (talk.is_shared or talk.is_copied or talk.copying_count):
            self.erased.append((talk.name, talk.marker))
        else:
            world.lending.leave_secrets(talk)
        talk.acked, talk.attempts, talk.is_copied = None, [], False
        talk.lives_count += 1
        talk.epochs.clear()
        world.directing.forget(talk)
        if erasure.unreachable:
            talk.may_be_erased = True
        else:
            talk.erased_s = began_s
        talk.messages = [talk.messages[0], {"role": "user", "content": talk.say()}]

    def _check_unknown(self, talk):
        """Check that no disk has a record of an agent that an erasure did not find."""
        world = self._world
        for name in world.nodes:
            record = world.disk_judge.records(name).get(talk.key)
            if record is not None and not (talk.is_shared or talk.may_be_erased):
                world.fail(f"{talk.name}: unknown, but {name} has it at epoch {record.epoch}")
        talk.acked, talk.attempts = None, []
        world.directing.forget(talk)

    # --- the client's connection to the router -----------------------------------------------

    def _send(self, router, talk, sampling):
        operation = OperationId(f"op-{talk.random.randrange(10**12):012}")
        call = _Call(operation, router.process)
        self._calls[call] = None
        if router.services is None:
            call.task = asyncio.create_task(asyncio.sleep(0))
            call.outbox.put_nowait(_router_gone())
            return call
        turn = TurnRequest(
            operation=call.operation,
            tenant=talk.tenant,
            model=MODEL,
            identity=talk.identity,
            sampling=sampling,
            prompt=chat_prompt(read_messages(talk.messages)),
            edits=talk.edits,
        )
        work = _handle(router.services, turn, call.outbox)
        call.task = self._world.loop.spawn(router.process, work)
        return call

    def on_router_death(self, process):
        for call in list(self._calls):
            if call.process is process:
                call.outbox.put_nowait(_router_gone())

    def _note_error(self, talk, error):
        self._world.note(f"{talk.name}: {error.status} {error.code}")
        self.errors[error.code] = self.errors.get(error.code, 0) + 1
        is_fine = int(error.status) in ALLOWED_STATUS
        if isinstance(error, NotFoundError):
            is_fine = error.code == "unknown_agent"
        if not is_fine:
            self._world.fail(f"{talk.name}: {error.status} {error.code}: {error.message}")


@dataclass(eq=False)
class _Call:
    operation: str
    process: object  # of the router that it goes through
    outbox: asyncio.Queue = field(default_factory=asyncio.Queue)
    task: object = None


async def _handle(services, turn, outbox):
    """Serve one client in the router, as its chat API does."""
    try:
        opened = await services.turns.open(turn)
        outbox.put_nowait(opened.admitted)
        try:
            async for event in opened.events():
                outbox.put_nowait(event)
        finally:
            await opened.close()
    except FabricError as error:
        outbox.put_nowait(error)


def _router_gone():
    error = FabricError("the router is gone", code="router_gone")
    error.status = 503
    return error
