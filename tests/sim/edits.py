"""Clients that edit their history, and the judge of edited caches.

Each cache entry reveals its inputs. So the judge knows of every cache that an answer begins with
whether it matches the prompt and, where it does not, which token each row is of, how far it was
moved, and which agent it came from.
"""

import contextlib
from collections import defaultdict
from unittest import mock

from fabric.edit_mode import EditMode
from fabric.ids import AgentId
from fabric.kvcache.arrangement import shift_runs
from fabric.turn.generation import Identity, IdentityKind
from node.turn.prefix import Prefixes
from node.turn.turn_sequence import Sequences
from tests.sim import oracle
from tests.sim.model import FULL, KINDS
from tests.sim.rows import ENTRY_BYTES, Rows
from tests.sim.window import window_entry

EDITING_ODDS = {"full": 0.9, "window": 0.9}  # by kind of model; others:
OTHERS_EDITING_ODDS = 0.3
PRESSED_ODDS = 0.5  # of lives with edits: those whose disks refuse and lose edited records
EDITING_ROUNDS = 2  # additional ones, as at first there is little to edit
AMORTIZE_ODDS, EDIT_ODDS, COPYCAT_ODDS = 0.8, 0.6, 0.3
MOVABLE = (FULL, KINDS["window"])  # models whose rows may be moved
ANYWHERE_ODDS, READ_ODDS = 0.5, 0.5  # of conversations; of turns of full models
LENDING_ODDS = 0.3  # of lives with edits: all read documents, and borrow rows of them
DOCUMENTS, DOCUMENT_WORDS = 4, 16  # read by all agents


class Edits:
    """The edits of one run, and the caches that they make."""

    def __init__(self, world, random):
        self._world = world
        odds = EDITING_ODDS.get(world.kind.name, OTHERS_EDITING_ODDS)
        self._is_editing = random.random() < odds and not world.is_crowded
        is_hard = self._is_editing and world.kind in MOVABLE
        self.is_pressed = is_hard and random.random() < PRESSED_ODDS
        lends = world.stream("lending lives").random() < LENDING_ODDS
        self._is_lending = self._is_editing and world.kind is FULL and lends
        self._streams = {}
        self._taken_out = {}  # by a talk's marker: its last edit's place, and the original message
        self._begun = defaultdict(list)  # by prompt: edited caches that answers began with
        self._begun_exactly = set()  # prompts, and resumed answers, that began with exact memory
        self._amortized = {}  # by talk: its last messages answered from edited memory
        self._documents = _documents(world.stream("documents"))
        self._anywhere = {}  # by talk: whether it requests other agents' rows
        self._borrowers = set()  # agents of such talks
        self.amortized_count = 0  # answers

    @contextlib.contextmanager
    def taps(self):
        """Mark every cache with its agent."""
        submit, restore = Sequences.submit, Prefixes.restore

        def submitted(sequences, agent, sequence, prepared):
            if not prepared.is_stored:
                prepared.cache.owner = agent.key
            submit(sequences, agent, sequence, prepared)

        def restored(prefixes, agent, prepared, cache, cancel):
            cache.owner = agent.key
            return restore(prefixes, agent, prepared, cache, cancel)

        with (
            mock.patch.object(Sequences, "submit", submitted),
            mock.patch.object(Prefixes, "restore", restored),
        ):
            yield

    # --- what clients do ---------------------------------------------------------------------

    def rounds(self, talk):
        """Return the number of additional turns of a conversation with edits."""
        return EDITING_ROUNDS if self._edits(talk) and self._world.kind in MOVABLE else 0

    def _edits(self, talk):
        return self._is_editing and talk.identity.kind is IdentityKind.AGENT

    def edit(self, talk):
        """Choose the mode of a turn, and now and then change earlier messages."""
        if not self._edits(talk):
            return
        random = self._stream(talk)
        amortizes = random.random() < AMORTIZE_ODDS
        if talk not in self._anywhere:
            self._anywhere[talk] = random.random() < ANYWHERE_ODDS or self._is_lending
        keeps = EditMode.ANYWHERE if self._anywhere[talk] else EditMode.AMORTIZE
        self.set_mode(talk, keeps if amortizes else EditMode.FORGET)
        if self._world.kind is FULL and (random.random() < READ_ODDS or self._is_lending):
            read = random.sample(self._documents, random.choice([1, 2]))
            texts = [{"role": "user", "content": text} for text in read]
            talk.messages = [*talk.messages[:-1], *texts, talk.messages[-1]]
        if random.random() < EDIT_ODDS:
            for _ in range(random.choice([1, 1, 2, 3])):
                self._edit_once(talk, random)

    def set_mode(self, talk, mode):
        """Set the edit mode that a conversation's turns request."""
        talk.edits = mode
        if mode is EditMode.ANYWHERE:
            self._borrowers.add(talk.key)

    def _edit_once(self, talk, random):
        messages = list(talk.messages)
        if len(messages) < 4:
            return
        place, before = self._taken_out.pop(talk.marker, (len(messages), None))
        if place < len(messages) - 1 and random.random() < 0.3:
            messages[place] = before  # restored, perhaps in the place of another
        else:
            place = random.randrange(1, len(messages) - 2)
            before = messages[place]
            how = random.randrange(4)
            if how == 0:
                del messages[place]
            else:
                # An emptied answer of white space would count as a spelling, and be restored.
                empty = "gone" if before["role"] == "assistant" else ""
                texts = (empty, "gone", talk.say())
                messages[place] = {**before, "content": texts[how - 1]}
        self._taken_out[talk.marker] = place, before
        self._world.note(f"{talk.name}: edits message {place} of {len(messages)}")
        talk.messages = messages

    def drop_original(self, talk):
        """Drop the message that a conversation's last edit removed, so that it is not restored."""
        self._taken_out.pop(talk.marker, None)

    def copycat(self, talk):
        """Return another client with the same messages, if edited memory served the answer."""
        messages = self._amortized.pop(talk, None)
        if messages is None or self._stream(talk).random() >= COPYCAT_ODDS:
            return None
        return self._as_another_client(talk, messages)

    def _as_another_client(self, talk, messages):
        random, tenants = self._stream(talk), {each.tenant for each in self._world.clients.talks}
        identity = Identity(IdentityKind.CONTENT)
        if random.random() < 0.5:
            identity = Identity(IdentityKind.AGENT, AgentId(f"cat-{random.randrange(10**6)}"))
        talk.is_copied = True
        self._world.note(f"{talk.name}: another client sends the same")
        made = type(talk)(random.choice(sorted(tenants)), identity, random, talk.number)
        made.messages = messages
        self.set_mode(made, random.choice([EditMode.AMORTIZE, EditMode.ANYWHERE]))
        return made

    def _stream(self, talk):
        name = f"edits {talk.number}"
        if name not in self._streams:
            self._streams[name] = self._world.stream(name)
        return self._streams[name]

    # --- the judge ---------------------------------------------------------------------------

    def note_start(self, cache, prompt, node):
        """Check the cache that an answer begins with, and keep a copy if it was edited."""
        if cache.kind not in MOVABLE:
            return
        ids = prompt[: cache.tokens_count]  # all, or all but the last one
        exact = oracle.exact_tokens(cache, ids)
        if cache.owner is not None:  # it may share what others computed for the same text
            Rows.share(cache.held[: exact * ENTRY_BYTES].tobytes(), cache.owner)
        self._world.lineage.settle(cache, exact, node)
        if exact == len(ids):
            self._begun_exactly.add(tuple(prompt))
            return
        problem = self.problem(cache, ids, cache.owner)
        if problem:
            self._world.fail(f"{cache.owner} continues from a cache that is not its own: {problem}")
        self._begun[tuple(prompt)].append(cache.copy(cache.tokens_count + 1))

    def problem(self, cache, ids, owner):
        """Return why an edited cache cannot be of these tokens; None if it may be."""
        if cache.kind not in MOVABLE or cache.ahead or cache.tokens_count != len(ids):
            return "it has another length"
        exact, held = oracle.exact_tokens(cache, ids), cache.held.tobytes()
        is_talk = any(talk.key == owner for talk in self._world.clients.talks)
        for run in shift_runs(cache.shifts, cache.tokens_count):
            for at in range(run.start, run.end):
                row = Rows.known.get(held[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES])
                if row is None:
                    return f"row {at} was never computed"
                token, place, *owners = row
                if token != ids[at]:
                    return f"row {at} is of {chr(token)!r}, not {chr(ids[at])!r}"
                if place + run.delta != at:
                    return f"row {at} was computed at {place}, not {at - run.delta}"
                if owner in owners or at < exact:
                    continue
                if owner in self._borrowers:
                    if not any(tenant == owner[0] for tenant, _ in owners):
                        return f"row {at} was computed for {owners}, of another tenant"
                elif is_talk:
                    return f"row {at} was computed for {owners}"
        return self._window_problem(cache, held)

    def _window_problem(self, cache, held):
        """Return which row of a window is of another token than that of its place."""
        for at in range(cache.window_base, cache.tokens_count if cache.windows.tokens else 0):
            entry = held[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES]
            if cache.windows.rows[at - cache.window_base].tobytes() != window_entry(entry):
                return f"the window's row {at} is that of another token"
        return None

    def explains(self, talk, variant, admitted, sampling, got):
        """Return whether an answer follows from the edited memory that it began with."""
        if not admitted.amortized_tokens:
            return False
        self._amortized[talk] = variant.messages
        self.amortized_count += 1
        return self._is_answer(tuple(map(ord, variant.prompt)), sampling, got)

    def _is_answer(self, prompt, sampling, got):
        """Follow an answer from its start, and from each point where it may have resumed."""
        due, seen = [0], set()
        while due:
            first = due.pop()
            if first in seen:
                continue
            seen.add(first)
            ids = prompt + tuple(map(ord, got.text[:first]))
            for answer in self._answers(ids, sampling, first):
                text = got.text[:first] + answer.text
                if (text, answer.reason, answer.tokens_count) == (
                    got.text,
                    got.reason,
                    got.tokens_count,
                ):
                    return True
                same = _common(text, got.text)
                due += range(first + 1, same + 1)
        return False

    def _answers(self, ids, sampling, first):
        """Yield the answers from every cache that an answer began or resumed with there."""
        for cache in self._begun[ids]:
            whole = cache.copy(len(ids))
            if whole.tokens_count < len(ids):
                whole.append(ids[-1])
            yield oracle.answer_from(whole, sampling, first)
        if ids in self._begun_exactly:  # a preempted turn may no longer find edited memory
            yield oracle.answer_to(ids, sampling, self._world.kind, first)


def _documents(random):
    words = ("delta", "ember", "fjord", "grove", "heron", "islet")
    return [" ".join(random.choices(words, k=DOCUMENT_WORDS)) for _ in range(DOCUMENTS)]


def _common(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
