"""The judge's own reading of a history under directives, from the documentation alone.

The directives of an agent are known for certain only after an answer. Until then each state counts
as possible that the agent may have.
"""

from collections import Counter
from dataclasses import dataclass, field

SYSTEM, TOOL = "system", "tool"


@dataclass(frozen=True)
class DirectiveEdit:
    """One message, or some of its characters, and what it reads instead."""

    operation: str
    mode: str
    replacement: str | None  # None: the message is left out
    result_of: str | None = None
    said: tuple | None = None  # role and text
    nth: int | None = None  # of the messages that say so; None: each
    span: tuple | None = None  # of its characters

    @property
    def forgets(self):
        return self.mode != "amortize"

    def concerns(self, message, nth):
        """Say whether it is of this message, before which `nth` say the same."""
        if message["role"] == SYSTEM:
            return False
        if self.result_of is not None:
            return message.get("tool_call_id") == self.result_of
        return name_of(message) == self.said and self.nth in {None, nth}


def name_of(message):
    """Return what identifies a message: its role and content."""
    return message["role"], message["content"]


def numbered(messages):
    """Return each message with how many before it say the same."""
    counts = Counter()
    for message in messages:
        yield message, counts[name_of(message)]
        counts[name_of(message)] += 1


def rewritten(messages, state):
    """Return a conversation as the template gets it.

    Of two for a whole message the newer one counts, and before any for some of its characters.
    """
    result = []
    for message, nth in numbered(messages):
        found = _done_to(message, nth, state)
        if found and found[0].span is None:
            text = found[0].replacement
            if text is not None or message["role"] == TOOL:  # a call goes with its result
                result.append({**message, "content": text or ""})
            continue
        text = message["content"]
        for edit in sorted(found, key=lambda edit: edit.span, reverse=True):
            start, end = edit.span
            text = text[:start] + (edit.replacement or "") + text[end:]
        result.append({**message, "content": text})
    return result


def concerned(messages, state):
    """List what of a state has a part in a conversation."""
    found = {id(edit) for pair in numbered(messages) for edit in _done_to(*pair, state)}
    return [edit for edit in state if id(edit) in found]


def _done_to(message, nth, state):
    """List the edits of a message: one of the whole message, or those of characters."""
    found = [edit for edit in state if edit.concerns(message, nth)]
    whole = [edit for edit in found if edit.span is None]
    return whole[-1:] or found


@dataclass(eq=False)
class Knowledge:
    """What is known of one agent's directives."""

    possible: list = field(default_factory=lambda: [()])  # states, each a tuple in order
    past: list = field(default_factory=lambda: [()])  # all that were ever possible
    held: tuple | None = None  # the node that has them for certain, and since when
    outstanding: dict = field(default_factory=dict)  # by operation: changes without an answer
    applied: frozenset = frozenset()  # what an acknowledged turn's prompt was rewritten by
    exact_since: str | None = None  # why the next turn must begin with exact memory
    is_unknown: bool = False  # its directives can no longer be determined

    def spread(self, change):
        """Let a change have been made, or not, or be made later."""
        self._set([*self.possible, *map(change, self.possible)])

    def settle(self, change):
        """Let a change have been made."""
        self._set(map(change, self.possible))

    def narrow(self, states, held):
        """Narrow the possible states to those of the present owner."""
        if states:
            self._set(states)
            for change in list(self.outstanding.values()):
                self.spread(change)
        self.held = held

    def begin_anew(self):
        """Forget all: there is no such agent; what is under way may reach another of its name."""
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


def adding(edit):
    """Return the change that adds directives of one operation; one that is there stays."""

    def change(state):
        known = {each.operation for each in state}
        return (*state, *(each for each in edit if each.operation not in known))

    return change


def removing(operations):
    """Return the change that removes the directives of some operations."""
    return lambda state: tuple(each for each in state if each.operation not in operations)


def removing_all(state):
    """Take all of them back."""
    return ()
