"""Application of policies to a conversation, one after another, with a check of each result."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from fabric.codec import dump_json, from_plain, to_plain
from fabric.errors import RejectedError
from fabric.limits import BODY_BYTES_MAX, MESSAGES_MAX
from fabric.settings import PolicySettings
from fabric.turn.messages import Message, MessageRole, template_form
from router.large_work import run_sized, weigh
from router.limits import QUOTED_NAME_CHARS_MAX
from router.policies.exchanges import last_of, unpaired
from router.policies.foreign_calls import PolicyLateError
from router.policies.policy import EditOutcome, PolicyTurn
from router.policies.registry import BUILT_IN, NamedPolicy, configured_policies, create_built_in

_ALL: Final = 1 << 40  # bytes: more than any conversation has


class InvalidEditError(Exception):
    """Invalid result of a policy."""


def check_result(before: Sequence[Message], after: Any) -> tuple[Message, ...]:
    """Return a policy's result as messages; raise InvalidEditError if it is invalid."""
    if not isinstance(after, (list, tuple)):
        message = "did not return a list of messages"
        raise InvalidEditError(message)
    if not 0 < len(after) <= MESSAGES_MAX:
        message = f"returned {len(after)} messages, not 1 to {MESSAGES_MAX}"
        raise InvalidEditError(message)
    original_ids = {id(each) for each in before}
    edited = tuple(each if id(each) in original_ids else _rebuilt(each) for each in after)
    for problem, is_wrong in _FORBIDDEN:
        if is_wrong(before, edited):
            raise InvalidEditError(problem)
    return edited


def edited_count(before: Sequence[Message], after: Sequence[Message]) -> int:
    """Return the number of messages that were changed or dropped."""
    before_ids, after_ids = {id(message) for message in before}, {id(message) for message in after}
    new_keys = Counter(_key(message) for message in after if id(message) not in before_ids)
    count = 0
    for message in before:
        if id(message) in after_ids:
            continue
        key = _key(message)
        if new_keys[key]:  # an equal copy
            new_keys[key] -= 1
        else:
            count += 1
    return count


def _key(message: Message) -> bytes:
    return dump_json(template_form(message))


def _rebuilt(message: Any) -> Message:
    """Return a message whose parts all have their types and can be sent to a node."""
    try:
        if type(message) is Message:
            plain = to_plain(message)
            json.dumps(plain, ensure_ascii=False, allow_nan=False).encode()
            rebuilt: Message = from_plain(Message, plain)
            return rebuilt
    except (RejectedError, TypeError, ValueError, RecursionError, AttributeError):
        pass
    problem = "returned an item that is not a message"
    raise InvalidEditError(problem)


def _systems(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message.role is MessageRole.SYSTEM]


def _last_user_message(messages: Sequence[Message]) -> Message | None:
    at = last_of(messages, MessageRole.USER)
    return messages[at] if at >= 0 else None


def _changes_system(before: Sequence[Message], after: Sequence[Message]) -> bool:
    is_first = before[0].role is MessageRole.SYSTEM
    return _systems(before) != _systems(after) or (is_first and before[0] != after[0])


_FORBIDDEN: Final[Sequence[tuple[str, Callable[[Sequence[Message], Sequence[Message]], bool]]]] = (
    ("changed the system prompt", _changes_system),
    (
        "changed the user's last message",
        lambda a, b: _last_user_message(a) != _last_user_message(b),
    ),
    ("changed the last message", lambda a, b: a[-1] != b[-1]),
    ("separated a call from its result", lambda a, b: bool(unpaired(b) - unpaired(a))),
    ("returned too much", lambda a, b: weigh(b, _ALL) > max(BODY_BYTES_MAX, weigh(a, _ALL))),
)


_LOG = logging.getLogger("macfabric.router.policies")


@dataclass(frozen=True, slots=True)
class RequestedPolicy:
    """Policy that a request names."""

    name: str
    options: Mapping[str, Any] | None
    param: str  # the parameter that names it


@dataclass(frozen=True, slots=True)
class EditedMessages:
    """Edited conversation, and the outcome of each policy."""

    messages: tuple[Message, ...] = field(repr=False)
    outcomes: tuple[EditOutcome, ...] = ()


class Editing:
    """Policies of a fabric and their application."""

    def __init__(self, settings: Sequence[PolicySettings] = ()) -> None:
        self._configured = {each.name: each for each in configured_policies(settings)}

    def select(self, requested: Sequence[RequestedPolicy] | None) -> list[NamedPolicy]:
        """Return the policies of a request; raise RejectedError for an unknown one."""
        if requested is None:
            return [each for each in self._configured.values() if each.by_default]
        return [self._find_policy(each) for each in requested]

    def _find_policy(self, requested: RequestedPolicy) -> NamedPolicy:
        found = self._configured.get(requested.name)
        if found is not None and requested.options is None:
            return found
        if requested.name in BUILT_IN:
            policy = create_built_in(requested.name, requested.options or {}, requested.param)
            return NamedPolicy(requested.name, policy)
        why = f"there is no policy {requested.name[:QUOTED_NAME_CHARS_MAX]!r} here"
        if found is not None:
            why = "only the operator may set options of this policy"
        message = f"Invalid '{requested.param}': {why}; known are {', '.join(self._known_names())}."
        raise RejectedError(message, code="unknown_policy", param=requested.param)

    def _known_names(self) -> list[str]:
        return sorted({*BUILT_IN, *self._configured})

    async def edited(
        self,
        owner: str,
        messages: Sequence[Message],
        size_bytes: int,
        model: str,
        policies: Sequence[NamedPolicy],
    ) -> EditedMessages:
        """Return the edited messages; a policy that fails leaves them unchanged."""
        answers = sum(message.role is MessageRole.ASSISTANT for message in messages)
        turn, edited, outcomes = PolicyTurn(answers, model), tuple(messages), []
        for each in policies:
            if each.calls is None:
                work = partial(_apply_policy, each, edited, turn)
                edited, outcome = await run_sized(owner, size_bytes, work)
            else:
                try:
                    edited, outcome = await each.calls.run(
                        partial(_applied_to_copies, each, edited, turn)
                    )
                except PolicyLateError as error:
                    outcome = EditOutcome(each.name, failure=str(error))
            if outcome.failure:
                _LOG.warning("policy %s left a turn unedited: it %s", each.name, outcome.failure)
            outcomes.append(outcome)
        return EditedMessages(edited, tuple(outcomes))


Applied = tuple[tuple[Message, ...], EditOutcome]


def _apply_policy(named: NamedPolicy, messages: tuple[Message, ...], turn: PolicyTurn) -> Applied:
    try:
        edited = check_result(messages, named.policy.transform(messages, turn))
        return edited, EditOutcome(named.name, edited_count(messages, edited))
    except InvalidEditError as error:
        return messages, EditOutcome(named.name, failure=str(error))
    except BaseException as error:  # noqa: BLE001 - a faulty policy must not fail the turn
        return messages, EditOutcome(named.name, failure=f"raised {_name_of(error)}")


def _name_of(error: BaseException) -> str:
    """Return an error's class name in characters that headers allow."""
    name = type(error).__name__[:QUOTED_NAME_CHARS_MAX]
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in name)


def _applied_to_copies(
    named: NamedPolicy, messages: tuple[Message, ...], turn: PolicyTurn
) -> Applied:
    """Apply a foreign policy to copies, as it may modify messages and then fail."""
    edited, outcome = _apply_policy(named, tuple(map(_copy_message, messages)), turn)
    return (messages if outcome.failure else edited), outcome


def _copy_message(message: Message) -> Message:
    uses = tuple(replace(use, arguments=deepcopy(use.arguments)) for use in message.uses)
    return replace(message, uses=uses) if uses else message
