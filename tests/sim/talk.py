"""A conversation as its client keeps it."""

import re
from dataclasses import dataclass, field

from fabric.edit_mode import EditMode
from fabric.ids import TenantId
from fabric.turn.generation import Identity, IdentityKind
from tests.sim.epochs import Epochs
from tests.sim.reuse_judge import Ack

MARKER = re.compile(r"<\d+\.\d+(\.\d+)?>")  # unique to one conversation
WORDS = ("river", "stone", "amber", "cloud", "lantern", "meadow", "harbor", "quiet", "copper")


@dataclass(eq=False)
class Talk:
    """A conversation as its client keeps it."""

    tenant: TenantId
    identity: Identity
    random: object
    number: int
    messages: list = field(default_factory=list)
    acked: Ack | None = None
    epochs: Epochs = field(default_factory=Epochs)  # of its answers
    attempts: list = field(default_factory=list)  # since the acknowledged one
    erased_s: float | None = None
    may_be_erased: bool = False  # an erasure may still be on its way
    is_shared: bool = False  # other clients use its name, too
    is_copied: bool = False  # another agent was made from its memory
    has_record_copies: bool = False  # of its record, as a fork or by a file
    copying_count: int = 0  # copies being made, or that may yet be
    lives_count: int = 0  # how often it restarted
    edits: EditMode = EditMode.FORGET  # of its next turn

    @property
    def marker(self):
        """A word that only this conversation has, new in each of its lives."""
        return f"<{self.number}.{self.lives_count}>"

    def begin_copy(self):
        """Record that a copy of its memory is being made, perhaps into its next life."""
        self.is_copied = self.has_record_copies = True
        self.copying_count += 1

    def end_copy(self):
        """Record that a copy is done."""
        self.is_copied = True
        self.copying_count -= 1

    def say(self):
        """Return a random next message."""
        count = self.random.choice([2, 6, 24])
        return f"{self.marker} {' '.join(self.random.choices(WORDS, k=count))}"

    @property
    def is_alone(self):
        """Return whether it has a name, and no other conversation uses that."""
        return self.identity.kind is IdentityKind.AGENT and not self.is_shared

    @property
    def key(self):
        return self.tenant, self.identity.agent

    @property
    def name(self):
        return f"{self.tenant}/{self.identity.agent or self.messages[1]['content'][:12]}"
