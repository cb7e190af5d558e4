"""Agents that read a text that another agent has read, and borrow its rows.

lender   | ... | a secret with a marker | a document |
reader   | its own words | the document, with rows that were computed after the secret | a note |
another  | its own words | the note, with rows of the reader |
"""

from dataclasses import dataclass, field
from itertools import pairwise

from fabric.edit_mode import EditMode
from fabric.ids import AgentId
from fabric.turn.generation import Identity, IdentityKind, Sampling
from tests.sim.model import FULL

DOCUMENT_ODDS, DOCUMENTS_MAX = 0.5, 5  # of turns; documents of one life
SECOND_ODDS = 0.5
TEXT_WORDS = 18
FIRST_NUMBER = 100  # of readers, so that their markers differ from those of clients
SYLLABLES = ("del", "ta", "em", "ber", "fjo", "rd", "gro", "ve", "her", "on", "is", "let")


@dataclass(eq=False)
class Loan:
    """A secret, the document after it, and the agents that borrowed rows of the document."""

    marker: str
    secret: dict
    document: dict
    readers: list = field(default_factory=list)

    def is_sent(self, messages):
        """Return whether a conversation has the document right after the secret."""
        return (self.secret, self.document) in pairwise(messages)


class Readers:
    """Readers of one run, with their own random stream."""

    def __init__(self, world):
        self._world = world
        self._random = world.stream("readers")
        self._loans = {}  # by talk: the last document that its agent received
        self._documents_count = self._count = 0

    def prepare(self, talk):
        """Add a secret and a document to an agent's next turn, now and then."""
        random, world = self._random, self._world
        is_apart = world.is_crowded or world.has_power_cuts  # lives with another focus
        may_lend = world.kind is FULL and not is_apart and talk.is_alone
        if (
            not may_lend
            or self._documents_count >= DOCUMENTS_MAX
            or random.random() >= DOCUMENT_ODDS
        ):
            return
        self._documents_count += 1
        marker = f"<{talk.number}.{talk.lives_count}.{self._documents_count}>"
        secret = {"role": "user", "content": f"{marker} {self._words(6)}"}
        document = {"role": "user", "content": self._words(TEXT_WORDS)}
        talk.messages = [*talk.messages[:-1], secret, document, talk.messages[-1]]
        self._loans[talk] = Loan(marker, secret, document)

    def loan(self, talk):
        """Return the last loan of an agent, if its client still sends the document."""
        loan = self._loans.get(talk)
        return loan if loan is not None and loan.is_sent(talk.messages) else None

    def end(self, talk):
        """Drop the loan of an agent, so that it gets another document."""
        self._loans.pop(talk, None)

    async def read(self, talk, loan):
        """Have one agent read the document, and another its note."""
        if loan.readers or self._world.directing.verbs.is_private(talk.key):
            return
        first = await self._read(talk.tenant, talk.acked, loan.document)
        if first is None:
            return
        loan.readers.append(first)
        if first.acked is not None and self._random.random() < SECOND_ODDS:
            second = await self._read(talk.tenant, first.acked, first.messages[-2])
            loan.readers += [second] if second is not None else []

    async def take_turns(self, loan):
        """Take another turn of each reader, from its own memory."""
        for reader in loan.readers:
            reader.messages = [*reader.messages, {"role": "user", "content": self._words(3)}]
            await self._world.clients.take_turn(reader, Sampling(max_tokens=8))

    async def _read(self, tenant, acked, message):
        """Start an agent on the lender's node, and have it read one message."""
        self._count += 1
        name = AgentId(f"reader-{self._count}-{self._random.randrange(10**6)}")
        reader = type(self._world.clients.talks[0])(
            tenant, Identity(IdentityKind.AGENT, name), self._random, FIRST_NUMBER + self._count
        )
        reader.messages = [
            {"role": "system", "content": self._words(6)},
            {"role": "user", "content": self._words(2)},
        ]
        if not await self._world.clients.take_turn(reader, Sampling(max_tokens=3)):
            return None
        if reader.acked is not None and reader.acked.node != acked.node:
            await self._world.lending.move(reader.key, acked.node)
        note = {"role": "user", "content": self._words(TEXT_WORDS)}
        reader.messages = [*reader.messages, message, note]
        self._world.edits.set_mode(reader, EditMode.ANYWHERE)
        if not await self._world.clients.take_turn(reader, Sampling(max_tokens=8)):
            return None
        return reader

    def _words(self, count):
        random = self._random
        return " ".join("".join(random.choices(SYLLABLES, k=3)) for _ in range(count))
