"""Lenders that are erased, made private or directed to forget soon after others borrowed.

Meanwhile the borrowed rows spread by moves, replicas, forks and files, and through restarts.
"""

from fabric.ids import AgentId, OperationId

SPREAD_ODDS, TAKEN_BACK_ODDS = 0.8, 0.8
ERASE_ODDS, FORGET_ODDS, ASK_ODDS = 0.4, 0.7, 0.5
DAMAGE_ODDS, READER_ODDS = 0.2, 0.25


class Lending:
    """Loans of one run, with their own random stream."""

    def __init__(self, world):
        self._world = world
        self._random = world.stream("lending")
        self._others = world.stream("lost loans")
        self._due = set()  # talks whose agents are to be erased
        self._loans_to_check = {}  # by talk: a loan to check after its next turn
        self._forgetting = {}  # by talk: the operation that has its agent forget a loan's secret
        self._left_out = {}  # by talk: the secret that its client no longer sends
        self._forgotten = []  # each talk with a marker that its agent forgot

    def is_due(self, talk):
        """Return whether a talk's agent is to be erased now."""
        is_due = talk in self._due
        self._due.discard(talk)
        return is_due

    async def act(self, talk):
        """Spread the rows that others have borrowed from a talk's agent, then revoke them."""
        random, readers = self._random, self._world.readers
        self._note_forgotten(talk)
        if talk in self._loans_to_check:
            await readers.take_turns(self._loans_to_check.pop(talk))
        if talk.acked is None or talk.attempts or not talk.is_alone:
            return
        loan = readers.loan(talk)
        if loan is not None:
            await readers.read(talk, loan)
        borrowers = self._world.lineage.new_borrowers(talk.key)
        if not borrowers:
            return
        ways = [self.move, self._replicate, self._fork, self._copy_by_file, self._kill]
        if random.random() < SPREAD_ODDS:
            for spread in random.sample(ways, random.choice([1, 2, 3])):
                await spread(random.choice(borrowers))
        if self._others.random() < DAMAGE_ODDS:
            await self._damage(self._others.choice([talk.key, *borrowers]))
        if random.random() < TAKEN_BACK_ODDS:
            await self._revoke(talk, loan)
            readers.end(talk)

    async def _revoke(self, talk, loan):
        random, directing = self._random, self._world.directing
        if loan is not None and loan.readers and self._others.random() < READER_ODDS:
            reader = self._others.choice(loan.readers)
            await self._others.choice([self._fork, self._copy_by_file])(reader.key)
            await self._world.clients.erase(reader)
            return
        if loan is not None and random.random() < ASK_ODDS:
            self._loans_to_check[talk] = loan
        if random.random() < ERASE_ODDS:
            self._due.add(talk)
        elif loan is not None and self._others.random() < FORGET_ODDS:
            await self._forget(talk, loan)
        else:
            await directing.verbs.share(talk, "agent")

    # --- forgotten ---------------------------------------------------------------------------

    async def _forget(self, talk, loan):
        """Have an agent forget its secret."""
        operation = await self._world.directing.forget_message(talk, loan.secret)
        if operation is not None:
            self._world.lineage.forget_word(talk, loan.marker)
            self._forgetting[talk] = operation, loan

    def _note_forgotten(self, talk):
        """Record the secret of an agent once a turn has applied the directive."""
        if talk not in self._forgetting or talk.acked is None or talk.attempts:
            return
        operation, loan = self._forgetting[talk]
        known = self._world.directing.judge.of(talk)
        is_applied = any(each.operation == operation for each in known.applied)
        if not is_applied or len(known.possible) > 1 or known.outstanding:
            return
        del self._forgetting[talk]
        self._left_out[talk] = loan.secret
        self._forgotten.append((talk, loan.marker))

    def prepare(self, talk):
        """Drop a forgotten secret from a turn, since an undone directive would restore it."""
        secret = self._left_out.pop(talk, None)
        if secret is not None:
            talk.messages = [each for each in talk.messages if each != secret]
            self._world.edits.drop_original(talk)

    def forgotten(self):
        """Yield the name of each agent that forgot a secret, and the secret's marker."""
        for talk, marker in self._forgotten:
            has_copies = talk.is_copied or talk.copying_count
            if talk.acked is None or has_copies or talk.may_be_erased:
                continue
            if talk in self._left_out:  # its client may send it to an agent that was evicted
                continue
            if not self._world.directing.judge.is_lost(talk, talk.acked.node):
                yield talk.name, marker

    def leave_secrets(self, talk):
        """Record that copies of an erased agent may hold words that it forgot."""
        self._forgotten = [each for each in self._forgotten if each[0] is not talk]
        self._world.lineage.remember_words(talk)

    # --- spreading ---------------------------------------------------------------------------

    async def move(self, key, name=None):
        """Move an agent to the given node, or to a random one."""
        name = name or self._random.choice(list(self._world.nodes))
        await self._ask(
            f"move {'/'.join(key)} to {name}",
            lambda services: services.moves.migrate(*key, name),
        )

    async def _replicate(self, key):
        name, kept = self._random.choice(list(self._world.nodes)), self._random.random() < 0.5
        await self._ask(
            f"replicate {'/'.join(key)} to {name}",
            lambda services: services.replicas.replicate(key, name, kept=kept),
        )

    async def _fork(self, key):
        random = self._random
        name = AgentId(f"loan-{random.randrange(10**6)}")
        to = random.choice([None, *self._world.nodes])
        operation = OperationId(f"op-{random.randrange(10**12):012}")
        self._mark_copied(key)
        await self._ask(
            f"fork {'/'.join(key)} as {name} to {to}",
            lambda services: services.forks.fork(key, name, to, operation),
        )

    async def _copy_by_file(self, key):
        self._mark_copied(key)
        name = AgentId(f"loan-{self._random.randrange(10**6)}")
        await self._world.chaos.actions.copy_by_file(key, name)

    def _mark_copied(self, key):
        """Record in all talks of an agent that it has copies, or may get them."""
        for talk in self._world.clients.talks:
            if talk.key == key:
                talk.begin_copy()

    async def _kill(self, key):
        host = self._owner(key)
        if host is not None:
            host.kill()

    async def _damage(self, key):
        """Damage one of an agent's blocks, and have its node quarantine it."""
        host = self._owner(key)
        agent = host.node.resources.table.get(key) if host is not None else None
        if agent is not None and agent.saved is not None and agent.saved.pieces.blocks:
            await self._world.chaos.lose_block(host, agent, agent.saved.pieces.blocks[-1])

    def _owner(self, key):
        """Return the host of the node that owns an agent, if it is well."""
        services = self._world.router.services
        owner = services.fleet.directory.owner(key) if services is not None else None
        host = self._world.nodes[owner.node] if owner is not None else None
        is_well = host is not None and host.is_serving and not host.process.is_frozen
        return host if is_well else None

    def _ask(self, what, work):
        return self._world.chaos.actions.ask(what, work)
