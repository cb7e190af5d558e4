"""Registry of policies: built-in ones, and classes of the operator's modules."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, NoReturn

from fabric.codec import from_plain
from fabric.errors import RejectedError
from fabric.settings import PolicySettings
from fabric.turn.messages import Message
from router.policies.drop_failed_tool_calls import DropFailedToolCalls
from router.policies.foreign_calls import ForeignCalls
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


_WHERE = "macfabric.router.policies"


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """Policy with its name in requests and answers."""

    name: str
    policy: EditPolicy
    by_default: bool = True
    calls: ForeignCalls[Any] | None = field(default=None, repr=False)  # None: built in


def configured_policies(settings: Sequence[PolicySettings]) -> Iterator[NamedPolicy]:
    """Yield the policies of the settings; raise RejectedError for an invalid one."""
    for at, each in enumerate(settings):
        where = f"{_WHERE}[{at}]"
        if ":" in each.use:
            policy = _load_policy(each, where)
            yield NamedPolicy(each.known_as, policy, each.by_default, ForeignCalls())
        elif each.use in BUILT_IN:
            policy = create_built_in(each.use, each.options, f"{where}.options")
            yield NamedPolicy(each.known_as, policy, each.by_default)
        else:
            names = ", ".join(BUILT_IN)
            _refuse(f"{where}.use", f"{each.use!r} is neither module:Class nor one of {names}")


def _load_policy(each: PolicySettings, where: str) -> EditPolicy:
    module, _, name = each.use.partition(":")
    try:
        policy_class = getattr(import_module(module), name)
    except Exception as error:  # noqa: BLE001 - a module may raise anything while it is imported
        problem = f"cannot import {each.use!r}: {type(error).__name__}: {error}"
        _refuse(f"{where}.use", problem)
    if not (inspect.isclass(policy_class) and issubclass(policy_class, EditPolicy)):
        _refuse(
            f"{where}.use", f"{each.use!r} is not a subclass of router.policies.policy.EditPolicy"
        )
    if inspect.isabstract(policy_class):
        _refuse(f"{where}.use", f"{each.use!r} has no transform")
    try:
        policy: EditPolicy = policy_class(**each.options)
    except Exception as error:  # noqa: BLE001 - likewise
        problem = f"{each.use!r} refuses them: {type(error).__name__}: {error}"
        _refuse(f"{where}.options", problem)
    return policy


def _refuse(where: str, why: str) -> NoReturn:
    message = f"{where}: {why}"
    raise RejectedError(message, code="invalid_settings")
