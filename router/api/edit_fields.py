"""What a request of any dialect says of edits: by headers, or in a field of ours in its body."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fabric.edit_mode import EDIT_MODES, EditMode
from fabric.limits import POLICIES_MAX, POLICY_NAME_CHARS_MAX
from router.http.fields import Fields, refuse, require_object, require_text
from router.policies.editing import RequestedPolicy

EDITS_HEADER: Final = "x-macfabric-edits"
POLICIES_HEADER: Final = "x-macfabric-policies"  # of answers, too: what each has done
OWN_FIELD: Final = "macfabric"  # of a body; SDKs send it as `extra_body`


@dataclass(frozen=True, slots=True)
class WantedEdits:
    """None is as the operator has it."""

    mode: EditMode | None = None
    policies: tuple[RequestedPolicy, ...] | None = None


AS_CONFIGURED: Final = WantedEdits()


def edits_of(headers: Mapping[str, str], fields: Fields) -> WantedEdits:
    """Read how a conversation is edited, and what becomes of its memory; headers come first."""
    own = Fields(fields.object(OWN_FIELD) or {}, f"{OWN_FIELD}.")
    mode = _mode(own.text("edits"), own.param("edits"))
    policies = _listed(own)
    if EDITS_HEADER in headers:
        mode = _mode(headers[EDITS_HEADER].strip().lower(), EDITS_HEADER)
    if POLICIES_HEADER in headers:
        policies = _named(headers[POLICIES_HEADER])
    return WantedEdits(mode, policies)


def _mode(name: str | None, param: str) -> EditMode | None:
    if name is None:
        return None
    if name not in EDIT_MODES:
        refuse(param, f"expected one of {', '.join(EDIT_MODES)}")
    return EDIT_MODES[name]


def _named(header: str) -> tuple[RequestedPolicy, ...]:
    names = [name.strip() for name in header.split(",") if name.strip()]
    if len(names) > POLICIES_MAX:
        refuse(POLICIES_HEADER, f"more than {POLICIES_MAX} policies")
    return tuple(_wanted(name, None, POLICIES_HEADER) for name in names)


def _listed(own: Fields) -> tuple[RequestedPolicy, ...] | None:
    items = own.items("policies", POLICIES_MAX)
    if items is None:
        return None
    return tuple(_item(item, f"{own.param('policies')}[{at}]") for at, item in enumerate(items))


def _item(item: Any, param: str) -> RequestedPolicy:
    """Read a name, or a built-in policy's name with options."""
    if isinstance(item, str):
        return _wanted(item, None, param)
    fields = Fields(require_object(item, param), f"{param}.")
    name = require_text(fields.require("name"), fields.param("name"))
    return _wanted(name, fields.object("options"), param)


def _wanted(name: str, options: Mapping[str, Any] | None, param: str) -> RequestedPolicy:
    if len(name) > POLICY_NAME_CHARS_MAX:
        refuse(param, f"longer than {POLICY_NAME_CHARS_MAX} characters")
    return RequestedPolicy(name, options, param)
