"""Edits requested in any dialect: by headers, or by the `macfabric` field."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fabric.edit_mode import EDIT_MODES, TRUNCATIONS, EditMode
from fabric.limits import POLICIES_MAX, POLICY_NAME_CHARS_MAX
from router.http.refusals import refuse
from router.http.schema import (
    AnyObject,
    ArrayOf,
    ObjectOf,
    Parsed,
    Text,
    WordIn,
    either,
    optional,
    required,
    words,
)
from router.policies.editing import RequestedPolicy

EDITS_HEADER: Final = "x-macfabric-edits"
POLICIES_HEADER: Final = "x-macfabric-policies"  # of answers, too: what each policy did
TRUNCATION_HEADER: Final = "x-macfabric-truncation"
OWN_FIELD: Final = "macfabric"  # of a body; SDKs send it as `extra_body`
_MODE: Final = WordIn(EDIT_MODES)
TRUNCATION: Final = words(*TRUNCATIONS, expected=" or ".join(TRUNCATIONS))
_NAME: Final = Text(POLICY_NAME_CHARS_MAX)


@dataclass(frozen=True, slots=True)
class EditOptions:
    """Mode, policies and truncation of a request; None: as the operator configured them."""

    mode: EditMode | None = None
    policies: tuple[RequestedPolicy, ...] | None = None
    truncation: str | None = None


AS_CONFIGURED: Final = EditOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy:
    """Built-in policy with options."""

    name: str = required(_NAME)
    options: dict[str, Any] | None = optional(AnyObject())


_POLICY: Final = ObjectOf(_Policy)


def _requested_policy(value: Any, param: str) -> RequestedPolicy:
    if isinstance(value, str):
        return RequestedPolicy(_NAME.read(value, param), None, param)
    policy = _POLICY.read(value, param)
    return RequestedPolicy(policy.name, policy.options, param)


_REQUESTED: Final = Parsed(_requested_policy, either(_NAME.schema(), _POLICY.schema()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnOptions:
    edits: EditMode | None = optional(_MODE)
    policies: list[RequestedPolicy] | None = optional(ArrayOf(_REQUESTED, POLICIES_MAX))
    truncation: str | None = optional(TRUNCATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnyBody:
    """Body of a turn in any dialect."""

    own: _OwnOptions = optional(ObjectOf(_OwnOptions), _OwnOptions(), OWN_FIELD)


ANY_BODY: Final = ObjectOf(_AnyBody)


def edits_of(headers: Mapping[str, str], sent: dict[str, Any]) -> EditOptions:
    """Return the requested edits; headers outrank the body."""
    options = ANY_BODY.read(sent).own
    mode, policies = options.edits, None if options.policies is None else tuple(options.policies)
    if EDITS_HEADER in headers:
        mode = _MODE.read(headers[EDITS_HEADER].strip().lower(), EDITS_HEADER)
    if POLICIES_HEADER in headers:
        policies = _named_policies(headers[POLICIES_HEADER])
    truncation = options.truncation
    if TRUNCATION_HEADER in headers:
        truncation = TRUNCATION.read(headers[TRUNCATION_HEADER].strip().lower(), TRUNCATION_HEADER)
    return EditOptions(mode, policies, truncation)


def _named_policies(header: str) -> tuple[RequestedPolicy, ...]:
    names = [name.strip() for name in header.split(",") if name.strip()]
    if len(names) > POLICIES_MAX:
        refuse(POLICIES_HEADER, f"more than {POLICIES_MAX} policies")
    return tuple(_requested_policy(name, POLICIES_HEADER) for name in names)
