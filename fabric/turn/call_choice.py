"""A client's constraints on the tools that an answer calls."""

from dataclasses import dataclass

from fabric.turn.text_rules import ToolText


@dataclass(frozen=True, slots=True)
class CallChoice:
    """Tools that must be called, and tools that may be."""

    must_call: bool = False  # the answer is calls, and nothing else
    names: tuple[str, ...] = ()  # what may be called; none: every tool of the request
    strict: tuple[str, ...] = ()  # whose arguments must fit their schemas, also if optional
    takes_one: bool = False  # no more than one call
    texts: tuple[ToolText, ...] = ()  # of tools that take a text with recursive rules

    @property
    def is_bound(self) -> bool:
        """Whether a call, once it begins, is constrained."""
        return self.must_call or bool(self.names or self.strict)


ANY_CALLS = CallChoice()
