"""The judge's own model of directives, written from the documentation alone.

An agent's directives are certain only after a reply. Until then every state that the agent may have
counts as possible.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass, field

SYSTEM, TOOL = "system", "tool"


@dataclass(frozen=True)
class DirectiveEdit:
    """An edit of one message, or of a span of its characters."""

    operation: str
    mode: str
    replacement: str | None  # None: the message is left out
    result_of: str | None = None
    target: tuple | None = None  # role and content of the message
    nth: int | None = None  # number among equal messages; None: all of them
    span: tuple | None = None  # of characters

    @property
    def forgets(self):
        return self.mode != "amortize"

    def concerns(self, message, nth):
        """Return whether this edits a message that `nth` equal ones precede."""
        if message["role"] == SYSTEM:
            return False
        if self.result_of is not None:
            return message.get("tool_call_id") == self.result_of
        return name_of(message) == self.target and self.nth in {None, nth}


def name_of(message):
    """Return what identifies a message: its role and content."""
    return message["role"], message["content"]


def numbered(messages):
    """Yield each message with the number of equal messages before it."""
    counts = Counter()
    for message in messages:
        yield message, counts[name_of(message)]
        counts[name_of(message)] += 1


def rewritten(messages, state):
    """Return a conversation as the template receives it.

    The newest edit of a whole message applies, and overrides all edits of its characters.
    """
    result = []
    for message, nth in numbered(messages):
        edits = _edits_of(message, nth, state)
        if edits and edits[0].span is None:
            text = edits[0].replacement
            if text is not None or message["role"] == TOOL:  # a tool call needs a result
                result.append({**message, "content": text or ""})
            continue
        text = message["content"]
        for edit in sorted(edits, key=lambda edit: edit.span, reverse=True):
            start, end = edit.span
            text = text[:start] + (edit.replacement or "") + text[end:]
        result.append({**message, "content": text})
    return result


def applicable_edits(messages, state):
    """List the edits of a state that apply to a conversation."""
    applied = {id(edit) for pair in numbered(messages) for edit in _edits_of(*pair, state)}
    return [edit for edit in state if id(edit) in applied]


def _edits_of(message, nth, state):
    """List the edits of a message: one of the whole message, or those of its characters."""
    edits = [edit for edit in state if edit.concerns(message, nth)]
    whole = [edit for edit in edits if edit.span is None]
    return whole[-1:] or edits


@dataclass(eq=False)
class Knowledge:
    """What is known of one agent's directives."""

    possible: list = field(default_factory=lambda: [()])  # states, each a tuple in order
    past: list = field(default_factory=lambda: [()])  # every state that was ever possible
    held: tuple | None = None  # (node that certainly has them, since when)
    outstanding: dict = field(default_factory=dict)  # by operation: changes without a reply
    applied: frozenset = frozenset()  # edits of the last acknowledged turn
    exact_since: str | None = None  # why the next turn must begin with exact memory
    is_unknown: bool = False  # its directives can no longer be determined
    calls: list = field(default_factory=list)  # by call without a reply: states since it was sent

    @contextlib.contextmanager
    def states_during_call(self):
        """Collect the states that are possible at any time between a call and its reply."""
        states = list(self.possible)
        self.calls.append(states)
        try:
            yield states
        finally:
            self.calls[:] = [each for each in self.calls if each is not states]

    def spread(self, change):
        """Record a change that may have been made, or may still be."""
        self._set([*self.possible, *map(change, self.possible)])

    def settle(self, change):
        """Record a change that was certainly made."""
        self._set(map(change, self.possible))

    def narrow(self, states, held):
        """Narrow the possible states to those of the present owner."""
        if states:
            self._set(states)
            for change in list(self.outstanding.values()):
                self.spread(change)
        self.held = held

    def begin_anew(self):
        """Reset for an erased agent; outstanding changes may reach a new one of its name."""
        self.possible, self.past = [()], [()]
        self.held = self.exact_since = None
        self.applied = frozenset()
        for change in list(self.outstanding.values()):
            self.spread(change)

    def copy(self):
        """Return the knowledge of an agent that starts as a copy."""
        return Knowledge(list(self.possible), list(self.past), is_unknown=self.is_unknown)

    def _set(self, states):
        self.possible = list(dict.fromkeys(states))
        self.past = list(dict.fromkeys([*self.past, *self.possible]))
        for seen in self.calls:
            seen.extend(self.possible)


def adding(edit):
    """Return the change that adds the directives of an operation that a state lacks."""

    def change(state):
        known = {each.operation for each in state}
        return (*state, *(each for each in edit if each.operation not in known))

    return change


def removing(operations):
    """Return the change that removes the directives of some operations."""
    return lambda state: tuple(each for each in state if each.operation not in operations)


def removing_all(state):
    """Return the state without directives."""
    return ()
