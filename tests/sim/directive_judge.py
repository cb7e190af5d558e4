"""Judge of directed agents, by their answers and their lists of directives.

An answer must follow from the history as the acknowledged directives rewrite it: never from the
history as sent, nor from undone directives. Excused are only agents whose node was in trouble, so
that they continued elsewhere from an older state.
"""

import contextlib
import re
from collections import Counter
from dataclasses import dataclass, replace
from unittest import mock

from fabric.edit_mode import EditMode
from node.turn.prefix import Prefixes
from tests.sim import oracle
from tests.sim.directives import Knowledge, applicable_edits, rewritten
from tests.sim.tokenizer import render

REBUILD = "rebuild"


@dataclass(frozen=True)
class PromptVariant:
    """A conversation's prompt under one possible state of directives, and its expected answer."""

    state: tuple
    messages: list
    prompt: str
    expected: oracle.Expected


class DirectiveJudge:
    """Comparison of answers and lists with the directives of their agents."""

    def __init__(self, world):
        self._world = world
        self._known = {}  # by talk
        self._prompts = {}  # by agent: the prompt of its last turn
        self.judged_count = 0  # answers that directives certainly affected

    @contextlib.contextmanager
    def taps(self):
        """Record the prompts that nodes compute."""
        prepare = Prefixes.prepare

        def prepared(prefixes, agent, plan, request):
            self._prompts[agent.key] = plan.text.decode()
            return prepare(prefixes, agent, plan, request)

        with mock.patch.object(Prefixes, "prepare", prepared):
            yield

    def of(self, talk):
        """Return the knowledge of a talk's directives."""
        return self._known.setdefault(talk, Knowledge())

    def begin_copy(self, talk, made, held):
        """Record that another agent begins with a talk's directives, as `held` by a node."""
        self._known[made] = self.of(talk).copy()
        self._known[made].held = held

    def variants(self, talk, sampling):
        """List the prompts that a turn may have under the possible states."""
        return self._variants(talk, sampling, self.of(talk).possible)

    def _variants(self, talk, sampling, states):
        found = {}
        for state in states:
            messages = rewritten(talk.messages, state)
            prompt = render(messages)
            # Directives of other modes may make the same prompt, of memory that is kept or not.
            is_kept = any(not each.forgets for each in applicable_edits(talk.messages, state))
            if (prompt, is_kept) not in found:
                expected = oracle.answer(messages, sampling, self._world.kind)
                found[prompt, is_kept] = PromptVariant(state, messages, prompt, expected)
        return list(found.values())

    def may_forget(self, talk):
        """Return whether a turn may have to begin with exact memory, whatever it requests."""
        known = self.of(talk)
        keeps_nothing = talk.edits in {None, EditMode.FORGET}
        edits = [each for state in known.past for each in state]
        return bool(keeps_nothing or known.exact_since or any(each.forgets for each in edits))

    def check_admitted(self, talk, admitted, variants):
        """Check the start of a turn: the first one after a directive to forget must be exact."""
        known = self.of(talk)
        why, known.exact_since = known.exact_since, None
        if not (why and admitted.amortized_tokens) or self.is_lost(talk, admitted.node):
            return
        edits = [
            edits for each in variants for edits in applicable_edits(talk.messages, each.state)
        ]
        if why == REBUILD or any(each.operation == why and each.forgets for each in edits):
            self._world.fail(
                f"{talk.name}: {why} requires exact memory, and the turn reuses"
                f" {admitted.amortized_tokens} tokens computed before"
            )

    def check_answer(self, talk, admitted, sampling, answer, variants):
        """Check an answer; return the prompts that explain it, none if it is wrong."""
        known, node = self.of(talk), admitted.node
        # A directive sent during the turn may have arrived in time.
        states = dict.fromkeys([*(each.state for each in variants), *known.possible])
        if is_lost := self.is_lost(talk, node):
            states |= dict.fromkeys(known.past)
        matches = self._matching(talk, admitted, sampling, answer, states)
        if matches and len(states) == 1:
            self.judged_count += bool(applicable_edits(talk.messages, known.possible[0]))
        if is_lost:
            prompts = {each.prompt for each in matches}
            states = [s for s in states if render(rewritten(talk.messages, s)) in prompts]
            known.narrow(states, (node, self._world.loop.now_s))
        if matches or known.is_unknown:
            return matches or variants
        if matches := self._respelled(talk, admitted, sampling, answer, variants):
            return matches
        outdated = self._matching(talk, admitted, sampling, answer, known.past)
        what = f" (as under an earlier state {outdated[0].state})" if outdated else ""
        expected = [each.expected for each in variants]
        self._world.fail(f"{talk.name}: got {answer}{what}, not {expected}")
        return []

    def _respelled(self, talk, admitted, sampling, answer, variants):
        """Return the variants that differ from the node's prompt by trimmed answers only.

        The node restores the spaces that a client seems to have trimmed; perhaps it never had them.
        """
        computed = self._prompts.get((talk.tenant, admitted.agent), "")
        alike = (each for each in variants if _trimmed(each.prompt) == _trimmed(computed))
        matches = [replace(each, prompt=computed) for each in alike]
        is_put_back = "restored spelling" in admitted.match_reason
        ids = tuple(map(ord, computed))
        expected = oracle.answer_to(ids, sampling, self._world.kind) if computed else None
        return matches if is_put_back and answer == expected else []

    def _matching(self, talk, admitted, sampling, answer, states):
        variants = self._variants(talk, sampling, states)
        return [
            each for each in variants if self._is_answer(talk, each, admitted, sampling, answer)
        ]

    def _is_answer(self, talk, variant, admitted, sampling, answer):
        if answer == variant.expected:
            return True
        is_kept = talk.edits is not None and talk.edits.keeps
        if talk.edits is None:
            edits = applicable_edits(talk.messages, variant.state)
            is_kept = any(not each.forgets for each in edits)
        return is_kept and self._world.edits.explains(talk, variant, admitted, sampling, answer)

    def note_durable(self, talk, end, variants):
        """Record the node that acknowledged a turn, and the directives applied to it."""
        known, (node, _, at_s) = self.of(talk), end
        known.held = (node, at_s)
        edits = [applicable_edits(talk.messages[:-1], each.state) for each in variants]
        known.applied = frozenset(edits[0]) if len(edits) == 1 else frozenset()

    def is_lost(self, talk, node):
        """Return whether an agent's directives may be lost with its node."""
        known = self.of(talk)
        if talk.may_be_erased or known.is_unknown:
            return True
        if known.held is None:
            return False
        return self._world.reuse_judge.may_have_less(talk.key, node, *known.held)

    def check_listed(self, talk, rows, node, states):
        """Check the directives that an agent's owner lists, in one of the given states."""
        listed = [_listed_edits(row) for row in rows]
        edits = [[_expected_listing(each) for each in state] for state in states]
        if listed not in edits and not self.is_lost(talk, node):
            self._world.fail(f"{talk.name}: {node} lists {listed}, not {edits}")

    def check_applied(self, talk, rows, node):
        """Check that the directives of an acknowledged turn are listed as applied."""
        if talk.attempts or len(self.of(talk).possible) > 1 or self.is_lost(talk, node):
            return
        known = self.of(talk)
        edits = Counter(
            _expected_listing(each) for each in known.applied if each in known.possible[0]
        )
        applied = Counter(_listed_edits(row) for row in rows if row["is_applied"])
        if edits - applied:
            self._world.fail(f"{talk.name}: {node} does not list {edits - applied} as applied")


def _trimmed(prompt):
    return re.sub(r"\x03 *([^\x03\x04]*?) *\x04", "\x03\\1\x04", prompt)


def _listed_edits(row):
    span = None if row["start"] is None else (row["start"], row["end"])
    is_exact = row["mode"] == EditMode.FORGET
    return row["operation"], is_exact, row["replacement_chars"], row["result_of"], span


def _expected_listing(edits):
    chars = None if edits.replacement is None else len(edits.replacement)
    return edits.operation, edits.forgets, chars, edits.result_of, edits.span
