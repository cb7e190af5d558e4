"""Judge of cache reuse: later turns find what was acknowledged as durable.

Excused are only agents that were evicted, had blocks damaged, or continued elsewhere because their
node was in trouble.
"""

from dataclasses import dataclass

from fabric.edit_mode import EditMode
from fabric.kvcache.cache_spec import CacheGroup
from fabric.record.manifest import OwnerState
from fabric.turn.generation import IdentityKind
from node.store.block_files import file_name
from tests.sim.model import END, FULL
from tests.sim.router_host import ROUTER

ANSWER_TOKENS_MAX = 48  # that clients ask for


@dataclass(frozen=True)
class Ack:
    """A turn whose last event reported it as durable."""

    prompt: str
    text: str  # prompt and answer, with its end token if it has one
    node: str
    epoch: int
    at_s: float  # when its node acknowledged it
    files: frozenset = frozenset()  # of its blocks
    exact_tokens: int | None = None  # before the first edited row


@dataclass(frozen=True)
class Attempt:
    """A turn that was sent; its node may have served it without the client getting a reply."""

    prompt: str
    edits: EditMode  # requested
    others: tuple = ()  # other prompts that directives may make of it
    may_keep: bool = False  # rows after an edit, so that only part of the memory is exact

    @property
    def prompts(self):
        """All prompts that its agent may have received."""
        return self.prompt, *self.others


class ReuseJudge:
    """Comparison of what turns find with what was acknowledged before."""

    def __init__(self, world):
        self._world = world
        self.judged_count = 0

    def ack(self, key, prompt, answer, end, admitted):
        """Return the acknowledgement of a turn; `end` has its node, epoch and time."""
        node, epoch, at_s = end
        record = self._world.disk_judge.records(node).get(key)
        files = frozenset(file_name(ref) for ref in record.refs) if record is not None else ()
        exact = None
        if admitted.amortized_tokens:
            exact = admitted.cached_tokens - admitted.amortized_tokens
            if record is not None and record.edited is not None:
                # Inserted tokens count as computed in the answer, and as edited in the record.
                inserted = sum(note.inserted_tokens for note in record.edited.notes)
                exact = max(exact - inserted, min(exact, record.edited.exact_tokens))
        elif record is not None and record.edited is not None:  # a kept block was damaged
            exact = record.edited.exact_tokens
        return Ack(prompt, prompt + answer, node, epoch, at_s, frozenset(files), exact)

    def is_judged(self, talk):
        """Return whether only this client determines the agent's memory."""
        is_named = talk.identity.kind is IdentityKind.AGENT
        return is_named and talk.acked is not None and not (talk.may_be_erased or talk.is_shared)

    def check_admitted(self, talk, admitted):
        """Check what a turn begins with; its own attempt is the last one recorded."""
        if not self.is_judged(talk) or self._is_excused(talk, admitted.node):
            return
        need = self._needed_tokens(talk.acked, talk.attempts)
        if need is None:
            return
        self.judged_count += 1
        if admitted.cached_tokens < need:
            acked = talk.acked
            self._world.fail(
                f"{talk.name}: acknowledged by {acked.node} at epoch {acked.epoch} with"
                f" {len(acked.text)} tokens; {admitted.node} at epoch {admitted.epoch} finds"
                f" {admitted.cached_tokens} of {need} ({admitted.cache}: {admitted.match_reason})"
            )

    def _needed_tokens(self, acked, attempts):
        *attempts, now = attempts
        stored, exact_tokens = acked.text, acked.exact_tokens
        need = min(min(_common(stored, prompt), len(prompt) - 1) for prompt in now.prompts)
        if self._world.kind is not FULL and (need < len(stored) or attempts):
            # Before its end, a context resumes only where a state or windows were kept.
            return None
        for attempt in attempts:  # each may have been served, but not saved
            need = min(need, *(_common(a, b) for a in attempt.prompts for b in now.prompts))
        if now.edits is EditMode.FORGET and any(each.may_keep for each in attempts):
            return None  # it is unknown how far the memory is exact
        was_exact = any(each.edits is EditMode.FORGET for each in (*attempts, now))
        if exact_tokens is not None and (was_exact or need <= exact_tokens):
            if self._world.kind is not FULL and exact_tokens < need:
                return None  # a move or a full disk keeps windows only for the end
            need = min(need, exact_tokens)  # for a turn that does not use the edited cache
        return need or None

    def _is_excused(self, talk, node):
        world, acked = self._world, talk.acked
        if world.watch.was_hurt(talk.key, acked.at_s):
            return True
        if world.lineage.was_cut(talk.key, acked.at_s):
            return True
        if any(acked.files & host.drive.hurt for host in world.nodes.values()):
            return True
        return self.may_have_less(talk.key, node, acked.node, acked.at_s)

    def may_have_less(self, key, node, acked_node, at_s):
        """Return whether a node may lack what another node acknowledged then."""
        watch = self._world.watch
        if any(watch.was_evicted(key, name, at_s) for name in (node, acked_node)):
            return True
        if node == acked_node:
            return False
        hosts = watch.hosts_since(key, at_s)  # it may have moved to a node that evicted it
        if any(watch.was_evicted(key, name, at_s) for name in hosts):
            return True
        names = {acked_node, ROUTER, *hosts} - {node}
        is_well = all(watch.was_well_since(name, at_s) for name in names)
        return not is_well or self._world.chaos.was_network_bad

    # --- when all is quiet ---------------------------------------------------------------------

    def check_end(self, talk):
        """Check what the agent's last owner stores, before its client sends it again."""
        if not self.is_judged(talk) or self._world.watch.evicted[talk.key]:
            return
        agents = [host.node.resources.table.get(talk.key) for host in self._world.nodes.values()]
        records = [agent.manifest for agent in agents if agent is not None]
        if not records:
            self._world.fail(f"{talk.name}: no node has its acknowledged turn")
            return
        owned = [r for r in records if r.state is not OwnerState.REPLICA] or records
        latest = max(owned, key=lambda record: (record.epoch, record.revision))
        if self._is_excused(talk, latest.owner) or self._explains(latest, talk):
            return
        acked = talk.acked
        self._world.fail(
            f"{talk.name}: {latest.owner} stores {latest.text[-40:]!r} at epoch {latest.epoch},"
            f" {acked.node} acknowledged {acked.text[-40:]!r} at epoch {acked.epoch}"
        )

    def _explains(self, record, talk):
        text, acked = record.text.rstrip(chr(END)), talk.acked.text.rstrip(chr(END))
        if text == acked:
            return True
        for attempt in (prompt for each in talk.attempts for prompt in each.prompts):
            least = _common(acked, attempt)
            if len(acked) > 2 * least or CacheGroup.STATE in self._world.kind.spec.groups:
                least = 0  # the agent may have restarted
            if text.startswith(attempt) or (attempt.startswith(text) and len(text) >= least):
                return True
        return False


def _common(a, b):
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return at
    return min(len(a), len(b))
