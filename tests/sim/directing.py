"""Clients that direct their agents, and replicas of such agents."""

import asyncio

from fabric.edit_mode import EditMode
from fabric.ids import AgentId, OperationId
from fabric.turn.generation import Identity, IdentityKind, Sampling
from tests.sim.api import Api
from tests.sim.directive_items import draw_items, superseding
from tests.sim.directive_judge import REBUILD, DirectiveJudge
from tests.sim.directives import TOOL, DirectiveEdit, adding, name_of, removing, removing_all
from tests.sim.privacy import Privacy
from tests.sim.privacy_probes import PrivacyProbes
from tests.sim.router_requests import RouterRequests
from tests.sim.verbs import Verbs

DIRECTING_ODDS = {"full": 0.7, "window": 0.7}  # of lives, by kind of model; others:
OTHERS_DIRECTING_ODDS = 0.4
TALK_ODDS, ACTION_ODDS, TOOL_ODDS, UNSAID_ODDS = 0.8, 0.8, 0.5, 0.6
AGAIN_ODDS, CONCURRENT_ODDS, SHOW_ODDS = 0.1, 0.25, 0.3
DIRECTING_ROUNDS = 2  # additional ones


class Directing:
    """Clients' directives of one run."""

    def __init__(self, world, random):
        self._world = world
        odds = DIRECTING_ODDS.get(world.kind.name, OTHERS_DIRECTING_ODDS)
        self._is_directing = random.random() < odds and not world.is_crowded
        self._streams = {}
        self._is_directed = {}  # by talk
        self._concurrent = {}  # by talk: the change made concurrently with its turns
        self._api = Api(world)
        self._ask = RouterRequests(world).in_router
        self.judge = DirectiveJudge(world)
        self.verbs = Verbs(world, self._api, self.stream)
        self.privacy = Privacy(world, self.verbs)
        self.privacy_probes = PrivacyProbes(world, self.verbs)

    def directs(self, talk):
        """Return whether a conversation gets directives now and then."""
        is_named = talk.identity.kind is IdentityKind.AGENT and not talk.is_shared
        if not (self._is_directing and is_named):
            return False
        if talk not in self._is_directed:
            self._is_directed[talk] = self.stream(talk).random() < TALK_ODDS
        return self._is_directed[talk]

    def rounds(self, talk):
        """Return the number of additional turns of such a conversation."""
        return DIRECTING_ROUNDS if self.directs(talk) else 0

    def stream(self, talk):
        """Return a conversation's own random stream."""
        name = f"directing {talk.number}"
        if name not in self._streams:
            self._streams[name] = self._world.stream(name)
        return self._streams[name]

    def prepare(self, talk):
        """Add a tool result to some turns, and let some not specify an edit mode."""
        if not self.directs(talk):
            return
        random = self.stream(talk)
        if random.random() < TOOL_ODDS:
            call = f"call-{random.choice([1, 2, 3])}"
            result = {"role": TOOL, "tool_call_id": call, "content": f"it is {talk.say()}"}
            talk.messages = [*talk.messages[:-1], result, talk.messages[-1]]
        if random.random() < UNSAID_ODDS:
            talk.edits = None  # as its directives specify
        elif talk.edits is None:
            talk.edits = EditMode.FORGET

    # --- actions -----------------------------------------------------------------------------

    async def act(self, talk):
        """Now and then direct the agent, or list its directives."""
        await self.end(talk)
        if not self.directs(talk) or talk.acked is None:
            return
        random = self.stream(talk)
        await self.privacy_probes.act(talk)
        if random.random() >= ACTION_ODDS:
            return
        changes = [self._post] * 10 + [self._undo] * 3 + [self._undo_all, self._supersede]
        others = (
            [self._rebuild, self._check_listing]
            + [self._copy] * 2
            + [self.verbs.change_settings] * 4
        )
        if _operations(self.judge.of(talk)):
            others += [self._copy] * 4
        action = random.choice([*changes, *others])
        if action in changes and random.random() < CONCURRENT_ODDS:
            work = action(talk, is_concurrent=True)
            self._concurrent[talk] = asyncio.create_task(work)
            return
        await action(talk)
        if random.random() < SHOW_ODDS:
            await self._check_listing(talk)

    async def end(self, talk):
        """Wait for a change made concurrently with a conversation's turns."""
        change = self._concurrent.pop(talk, None)
        if change is not None:
            await change

    def forget(self, talk):
        """Record that a conversation's agent was erased."""
        self.judge.of(talk).begin_anew()
        self.verbs.forget(talk.key)

    async def _post(self, talk, *, is_concurrent=False):
        random, known = self.stream(talk), self.judge.of(talk)
        operation = OperationId(f"direct-{random.randrange(10**9):09}")
        held = _operations(known)
        if not all(len({edits.operation for edits in s}) == len(held) for s in known.possible):
            held = []  # an undone operation would be rejected
        if held and random.random() < AGAIN_ODDS:
            operation = OperationId(random.choice(held))  # a repeated one, which changes nothing
        may_place = not (is_concurrent or talk.attempts)
        items, edits = draw_items(random, talk, known, operation, may_place=may_place)
        if items:
            body = {"operation": operation, "directives": items}
            await self._change(
                talk, "add", body, operation, adding(edits), is_concurrent=is_concurrent
            )

    async def forget_message(self, talk, message):
        """Have an agent forget a message; return the operation, or None if that is impossible."""
        known = self.judge.of(talk)
        edits_before = [each for state in known.past for each in state]
        if any(each.concerns(message, 0) for each in edits_before):
            return None
        operation = OperationId(f"direct-{self.stream(talk).randrange(10**9):09}")
        item = {"message": {"role": message["role"], "content": message["content"]}}
        body = {"operation": operation, "directives": [item | {"mode": "forget"}]}
        change = adding([DirectiveEdit(operation, "forget", None, target=name_of(message))])
        await self._change(talk, "add", body, operation, change, is_concurrent=False)
        held = [any(each.operation == operation for each in state) for state in known.possible]
        return operation if all(held) else None

    async def _supersede(self, talk, *, is_concurrent=False):
        random = self.stream(talk)
        calls = sorted({m["tool_call_id"] for m in talk.messages if m["role"] == TOOL})
        if len(calls) < 2:
            return
        operation = OperationId(f"direct-{random.randrange(10**9):09}")
        (earlier, later), mode = random.sample(calls, 2), random.choice(["exact", "amortize"])
        body = {"earlier": {"tool_call_id": earlier}, "later": {"tool_call_id": later}}
        body |= {"mode": mode, "operation": operation}
        change = adding([superseding(operation, mode, earlier, later)])
        await self._change(talk, "supersede", body, operation, change, is_concurrent=is_concurrent)

    async def _undo(self, talk, *, is_concurrent=False):
        held = _operations(self.judge.of(talk))
        if held:
            undone = self.stream(talk).choice(held)
            change = removing({undone})
            await self._change(talk, "remove", None, undone, change, is_concurrent=is_concurrent)

    async def _undo_all(self, talk, *, is_concurrent=False):
        await self._change(
            talk, "remove_all", None, None, removing_all, is_concurrent=is_concurrent
        )

    async def _change(self, talk, verb, body, operation, change, *, is_concurrent):
        """Change directives; repeat the operation until its outcome is clear."""
        world, known = self._world, self.judge.of(talk)
        before, since_s = known.possible, world.loop.now_s
        world.lineage.begun_count += 1
        known.outstanding[verb, operation] = change
        known.spread(change)
        if verb in {"remove", "remove_all"}:
            world.lineage.remember_words(talk)
        world.note(f"{talk.name}: {verb} {operation} {body}")
        path = {"operation": operation} if verb == "remove" else {}
        with known.states_during_call() as states:
            row, is_certain = await self._api.repeat_call(
                talk, self.stream(talk), verb, body, is_concurrent=is_concurrent, **path
            )
        if row is None:
            if is_certain and not world.network.is_bad and not is_concurrent:
                known.possible = before
                del known.outstanding[verb, operation]
            return
        if self.judge.is_lost(talk, row["node"]):
            # In that older state a number may name another message.
            known.is_unknown |= any(each.nth is not None for s in known.possible for each in s)
            known.possible = known.past
        del known.outstanding[verb, operation]
        known.settle(change)
        known.held = (row["node"], since_s)
        # A reply that arrives late lists the directives as of then.
        listable = [*known.possible, *map(change, states)]
        self.judge.check_listed(talk, row["directives"], row["node"], listable)
        is_new = operation not in {edits.operation for state in before for edits in state}
        if verb in {"add", "supersede"} and is_new and not (is_concurrent or talk.attempts):
            known.exact_since = operation

    async def _rebuild(self, talk):
        row, _ = await self._api.repeat_call(talk, self.stream(talk), "rebuild")
        if row is not None and not talk.attempts:
            self.judge.of(talk).exact_since = REBUILD

    async def _check_listing(self, talk):
        row, _ = await self._api.repeat_call(talk, self.stream(talk), "show")
        if row is not None:
            known = self.judge.of(talk)
            self.judge.check_listed(talk, row["directives"], row["node"], known.possible)
            self.judge.check_applied(talk, row["directives"], row["node"])

    # --- copies ------------------------------------------------------------------------------

    async def _copy(self, talk):
        """Copy an agent by a fork or a file, and have the copy take the next turn."""
        if talk.attempts:
            return
        random, world = self.stream(talk), self._world
        name = AgentId(f"heir-{random.randrange(10**6)}")
        is_private = self.verbs.is_private(talk.key)
        talk.begin_copy()
        if random.random() < 0.6:
            done = await self._fork(talk, name)
            is_private &= self.verbs.is_private(talk.key, talk.acked.node)
            if done.result is not None and is_private:
                world.fail(f"{talk.name}: its memory is private, but was forked")
        else:
            done = await world.chaos.actions.copy_by_file(talk.key, name)
        is_copied = done is not None and done.result is not None
        if done is None or done.is_over:
            talk.end_copy()
        if is_copied:
            await self._continue_as(talk, name, getattr(done.result, "source", None))

    async def _fork(self, talk, name):
        random = self.stream(talk)
        to = random.choice([None, *self._world.nodes])
        operation = OperationId(f"op-{random.randrange(10**12):012}")
        return await self._ask(
            f"fork {talk.name} as {name} to {to}",
            lambda services: services.forks.fork(talk.key, name, to, operation),
            meets_damage=True,
        )

    async def _continue_as(self, talk, name, source):
        world, key = self._world, (talk.tenant, name)
        node = next((n for n in world.nodes if key in world.disk_judge.records(n)), None)
        copy = type(talk)(
            talk.tenant, Identity(IdentityKind.AGENT, name), self.stream(talk), talk.number
        )
        copy.lives_count, copy.edits = talk.lives_count, talk.edits
        copy.messages = [*talk.messages, {"role": "user", "content": copy.say()}]
        self.judge.begin_copy(talk, copy, (node, world.loop.now_s))
        known, held = self.judge.of(copy), self.judge.of(talk).held
        source = source or (held and held[0])
        known.is_unknown |= node is None or self.judge.is_lost(talk, source)
        world.note(f"{talk.name}: {name} continues from there")
        world.edits.set_mode(copy, copy.edits)
        await world.clients.take_turn(copy, Sampling(max_tokens=8))


def _operations(known):
    return sorted({edits.operation for state in known.possible for edits in state})
