"""Judge of directed agents, by their answers and their lists of directives.

An answer must be that of the history as acknowledged directives have it: never that of what was
sent, and once they are undone never that of what they said. Excused is only whose node was in
trouble since, so that the agent went on elsewhere with less.
"""

import contextlib
import re
from collections import Counter
from dataclasses import dataclass, replace
from unittest import mock

from fabric.edit_mode import EditMode
from node.turn.prefix import Prefixes
from tests.sim import oracle
from tests.sim.directives import Knowledge, concerned, rewritten
from tests.sim.tokenizer import render

REBUILD = "rebuild"


@dataclass(frozen=True)
class PromptVariant:
    """A prompt that possible directives make of a conversation, and its expected answer."""

    state: tuple
    messages: list
    prompt: str
    expected: oracle.Expected


class DirectiveJudge:
    """Compares the answers of agents with their directives."""

    def __init__(self, world):
        self._world = world
        self._known = {}  # by talk
        self._fed = {}  # by agent: the prompt that its last turn was fed
        self.judged_count = 0  # answers that directives had a part in, for certain

    @contextlib.contextmanager
    def taps(self):
        """Record the prompts that nodes compute."""
        prepare = Prefixes.prepare

        def prepared(prefixes, agent, plan, request):
            self._fed[agent.key] = plan.text.decode()
            return prepare(prefixes, agent, plan, request)

        with mock.patch.object(Prefixes, "prepare", prepared):
            yield

    def of(self, talk):
        """Return what is known of a talk's directives."""
        return self._known.setdefault(talk, Knowledge())

    def copied(self, talk, made, held):
        """Note that another agent begins with a talk's directives, on a node since then."""
        self._known[made] = self.of(talk).copy()
        self._known[made].held = held

    def variants(self, talk, sampling):
        """List what an answer may be an answer to."""
        return self._variants(talk, sampling, self.of(talk).possible)

    def _variants(self, talk, sampling, states):
        found = {}
        for state in states:
            messages = rewritten(talk.messages, state)
            prompt = render(messages)
            # Directives of other modes may make the same prompt, of memory that is kept or not.
            is_kept = any(not each.forgets for each in concerned(talk.messages, state))
            if (prompt, is_kept) not in found:
                expected = oracle.answer(messages, sampling, self._world.kind)
                found[prompt, is_kept] = PromptVariant(state, messages, prompt, expected)
        return list(found.values())

    def may_forget(self, talk):
        """Say whether a turn may have to begin with exact memory, whatever it asks for."""
        known = self.of(talk)
        is_unsaid = talk.edits in {None, EditMode.FORGET}
        edits = [each for state in known.past for each in state]
        return bool(is_unsaid or known.exact_since or any(each.forgets for each in edits))

    def check_admitted(self, talk, admitted, variants):
        """Judge what a turn begins with: the first one behind a word to forget is exact."""
        known = self.of(talk)
        why, known.exact_since = known.exact_since, None
        if not (why and admitted.amortized_tokens) or self.is_lost(talk, admitted.node):
            return
        edits = [edits for each in variants for edits in concerned(talk.messages, each.state)]
        if why == REBUILD or any(each.operation == why and each.forgets for each in edits):
            self._world.fail(
                f"{talk.name}: {why} makes it forget, and it continues with"
                f" {admitted.amortized_tokens} tokens of before"
            )

    def check_answer(self, talk, admitted, sampling, answer, variants):
        """Judge an answer; return what it may be an answer to, nothing where it is wrong."""
        known, node = self.of(talk), admitted.node
        # What is said meanwhile may have come in time.
        states = dict.fromkeys([*(each.state for each in variants), *known.possible])
        if is_lost := self.is_lost(talk, node):
            states |= dict.fromkeys(known.past)
        found = self._answered(talk, admitted, sampling, answer, states)
        if found and len(states) == 1:
            self.judged_count += bool(concerned(talk.messages, known.possible[0]))
        if is_lost:
            prompts = {each.prompt for each in found}
            states = [s for s in states if render(rewritten(talk.messages, s)) in prompts]
            known.narrow(states, (node, self._world.loop.now_s))
        if found or known.is_unknown:
            return found or variants
        if found := self._respelled(talk, admitted, sampling, answer, variants):
            return found
        before = self._answered(talk, admitted, sampling, answer, known.past)
        what = f" (as an earlier state {before[0].state} has it)" if before else ""
        expected = [each.expected for each in variants]
        self._world.fail(f"{talk.name}: got {answer}{what}, not {expected}")
        return []

    def _respelled(self, talk, admitted, sampling, answer, variants):
        """Find what was answered with others' spaces at the ends of answers that they know, too.

        A client that never had them looks like one that trims them.
        """
        fed = self._fed.get((talk.tenant, admitted.agent), "")
        alike = (each for each in variants if _trimmed(each.prompt) == _trimmed(fed))
        found = [replace(each, prompt=fed) for each in alike]
        is_put_back = "restored spelling" in admitted.match_reason
        expected = (
            oracle.answer_to(tuple(map(ord, fed)), sampling, self._world.kind) if fed else None
        )
        return found if is_put_back and answer == expected else []

    def _answered(self, talk, admitted, sampling, answer, states):
        variants = self._variants(talk, sampling, states)
        return [
            each for each in variants if self._is_answer(talk, each, admitted, sampling, answer)
        ]

    def _is_answer(self, talk, variant, admitted, sampling, answer):
        if answer == variant.expected:
            return True
        is_kept = talk.edits is not None and talk.edits.keeps
        if talk.edits is None:
            edits = concerned(talk.messages, variant.state)
            is_kept = any(not each.forgets for each in edits)
        return is_kept and self._world.edits.explains(talk, variant, admitted, sampling, answer)

    def note_durable(self, talk, end, found):
        """Note who acknowledged a turn, and the directives applied to it."""
        known, (node, _, at_s) = self.of(talk), end
        known.held = (node, at_s)
        edits = [concerned(talk.messages[:-1], each.state) for each in found]
        known.applied = frozenset(edits[0]) if len(edits) == 1 else frozenset()

    def is_lost(self, talk, node):
        """Say whether an agent's directives may be lost with its node."""
        known = self.of(talk)
        if talk.may_be_erased or known.is_unknown:
            return True
        if known.held is None:
            return False
        return self._world.reuse_judge.may_have_less(talk.key, node, *known.held)

    def check_listed(self, talk, rows, node):
        """Judge what an agent's owner lists."""
        known, listed = self.of(talk), [_listed(row) for row in rows]
        edits = [[_as_listed(each) for each in state] for state in known.possible]
        if listed not in edits and not self.is_lost(talk, node):
            self._world.fail(f"{talk.name}: {node} lists {listed}, its directives are {edits}")

    def check_applied(self, talk, rows, node):
        """Judge whether directives of an acknowledged turn are listed as applied."""
        if talk.attempts or len(self.of(talk).possible) > 1 or self.is_lost(talk, node):
            return
        known = self.of(talk)
        edits = Counter(_as_listed(each) for each in known.applied if each in known.possible[0])
        applied = Counter(_listed(row) for row in rows if row["is_applied"])
        if edits - applied:
            self._world.fail(f"{talk.name}: {node} does not say that {edits - applied} is applied")


def _trimmed(prompt):
    return re.sub(r"\x03 *([^\x03\x04]*?) *\x04", "\x03\\1\x04", prompt)


def _listed(row):
    span = None if row["start"] is None else (row["start"], row["end"])
    is_exact = row["mode"] == EditMode.FORGET
    return row["operation"], is_exact, row["replacement_chars"], row["result_of"], span


def _as_listed(edits):
    chars = None if edits.replacement is None else len(edits.replacement)
    return edits.operation, edits.forgets, chars, edits.result_of, edits.span
