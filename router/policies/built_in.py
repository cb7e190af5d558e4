"""Registry of the built-in policies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from fabric.codec import from_plain
from fabric.errors import RejectedError
from fabric.turn.messages import Message
from router.policies.drop_failed_tool_calls import DropFailedToolCalls
from router.policies.policy import EditPolicy, PolicyTurn
from router.policies.strip_thinking import StripThinking
from router.policies.summarize_to_stub import SummarizeToStub
from router.policies.truncate_older_than import TruncateOlderThan


@dataclass(frozen=True, slots=True)
class KeepAll(EditPolicy):
    """Policy without edits: its name lets a request turn policies off."""

    def transform(self, messages: Sequence[Message], turn: PolicyTurn) -> Sequence[Message]:
        return messages


BUILT_IN: Final[Mapping[str, type[EditPolicy]]] = MappingProxyType(
    {
        "keep_all": KeepAll,
        "truncate_older_than": TruncateOlderThan,
        "drop_failed_tool_calls": DropFailedToolCalls,
        "strip_thinking": StripThinking,
        "summarize_to_stub": SummarizeToStub,
    }
)


def create_built_in(use: str, options: Mapping[str, Any], where: str) -> EditPolicy:
    """Return a built-in policy; raise RejectedError naming an invalid option below `where`."""
    try:
        policy: EditPolicy = from_plain(BUILT_IN[use], dict(options), where)
    except RejectedError as error:
        at = where if error.param in (None, where) else error.param
        message = error.message if str(at).startswith(where) else f"{where}: {error.message}"
        raise RejectedError(message, code="invalid_policy", param=where) from None
    return policy
