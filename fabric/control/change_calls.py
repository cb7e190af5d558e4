"""Incremental heartbeats: changes of a node's view, links and agents since the caller's last.

    describe_changes   the fields of the view that changed, and the links that did
    list_changes       the agents that changed, in rows, each sketch from where it changed

A caller sends the numbers of the last reply, and gets everything if the node cannot compute the
difference. An older node refuses these calls as unknown; then `Describe` and `ListAgents` do.
"""

from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from types import NoneType
from typing import Any, Final, get_args, get_origin, get_type_hints

from xxhash import xxh32_intdigest

from fabric.codec import (
    from_newer,
    from_plain,
    has_fields,
    known_part,
    left_out,
    on_wire,
    to_plain,
    wire_name,
    with_fields,
)
from fabric.control.agent_at import AgentName
from fabric.control.node_calls import AgentSketch, AgentView, NodeView
from fabric.errors import RejectedError
from fabric.net.links import LinkView

LINKS: Final = "links"  # field of a view that is sent apart
OTHER_COLUMNS: Final = "other_columns"  # code of the error for a list in rows of another version


@dataclass(frozen=True, slots=True)
class DescribeChanges:
    """Request for the changes of the node's state; also the heartbeat."""

    incarnation: int = field(default=0, metadata=on_wire("i"))
    view: int = field(default=0, metadata=on_wire("v"))  # number of the view that the caller has
    links: int = field(default=0, metadata=on_wire("l"))  # number of the last change of a link


@dataclass(frozen=True, slots=True)
class ViewChanges:
    """Fields of a node's view that changed since `since`, by their names in bytes; all if 0."""

    incarnation: int = field(metadata=on_wire("i"))
    view: int = field(metadata=on_wire("v"))
    since: int = field(metadata=on_wire("s"))
    links: int = field(metadata=on_wire("l"))
    fields: dict[str, Any] = field(default_factory=dict, metadata=on_wire("f"))
    changed_links: tuple[LinkView, ...] | None = field(
        default=None, metadata=on_wire("c") | left_out()
    )
    has_all_links: bool | None = field(default=None, metadata=on_wire("a") | left_out())

    def apply_to(self, known: NodeView | None) -> NodeView:
        """Return the view after these changes; raise RejectedError if they do not fit."""
        if self.since == 0:
            view: NodeView = from_newer(NodeView, self.fields, "view")
        elif known is None:
            message = "changes of an unknown view"
            raise RejectedError(message, code="invalid_message")
        else:
            changed = known_part(NodeView, self.fields)
            view = with_fields(known, changed, "view") if changed else known
        old = () if known is None or self.has_all_links else known.links
        return _with_links(view, old, self.changed_links)


def view_changes(old: NodeView, new: NodeView) -> dict[str, Any]:
    """Return the fields in which two views differ, except links, as plain data."""
    return {
        wire_name(each): to_plain(getattr(new, each.name))
        for each in fields(NodeView)
        if each.name != LINKS and getattr(old, each.name) != getattr(new, each.name)
    }


def view_fields(view: NodeView) -> dict[str, Any]:
    """Return all fields of a view except links, as plain data."""
    plain: dict[str, Any] = to_plain(view)
    del plain[LINKS]
    return plain


def _with_links(
    view: NodeView, old: tuple[LinkView, ...], changed: tuple[LinkView, ...] | None
) -> NodeView:
    if not changed:
        return view if view.links == old else replace(view, links=old)
    links = {(link.peer, link.host, link.port): link for link in (*old, *changed)}
    return replace(view, links=tuple(links[name] for name in sorted(links)))


@dataclass(frozen=True, slots=True)
class ListChanges:
    """Request for the agents that changed after `since`; 0 asks for all."""

    incarnation: int = field(metadata=on_wire("i"))
    since: int = field(metadata=on_wire("s"))
    columns: int = field(metadata=on_wire("c"))  # version of the rows: `COLUMNS` of the caller


@dataclass(frozen=True, slots=True)
class AgentRow:
    """Agent's view as a row, and the part of its sketch that the caller lacks."""

    view: list[Any] = field(metadata=on_wire("v"))
    sketch: tuple[int, ...] = field(default=(), metadata=on_wire("s"))
    form: int | None = field(default=None, metadata=on_wire("f") | left_out())
    kept: tuple[int, int] | None = field(default=None, metadata=on_wire("k") | left_out())

    @classmethod
    def of(cls, item: AgentSketch) -> "AgentRow":
        """Return the row of a listed agent."""
        return cls(to_row(item.view), item.sketch, item.form, item.kept)

    def to_agent_sketch(self) -> AgentSketch:
        """Return the agent with its sketch; raise RejectedError for a row of another version."""
        return AgentSketch(from_row(AgentView, self.view), self.sketch, self.form, self.kept)


@dataclass(frozen=True, slots=True)
class AgentChanges:
    """List of agents in rows, otherwise as `AgentList`."""

    incarnation: int = field(metadata=on_wire("i"))
    changes: int = field(metadata=on_wire("n"))
    since: int = field(metadata=on_wire("s"))
    agents: tuple[AgentRow, ...] = field(metadata=on_wire("a"))
    gone: tuple[AgentName, ...] | None = field(default=None, metadata=on_wire("g") | left_out())
    more: bool | None = field(default=None, metadata=on_wire("m") | left_out())


def to_row(value: Any) -> Any:
    """Turn a dataclass into the list of its fields' values, and those of classes in it likewise.

    The last ones are omitted if they have their defaults.
    """
    if has_fields(type(value)):
        columns = fields(value)
        while columns and getattr(value, columns[-1].name) == columns[-1].default:
            columns = columns[:-1]
        return [to_row(getattr(value, each.name)) for each in columns]
    if isinstance(value, tuple):
        return [to_row(item) for item in value]
    return to_plain(value)


def from_row(kind: Any, row: Any) -> Any:
    """Build a `kind` from its row; raise RejectedError for anything else."""
    return from_plain(kind, _plain_of(kind, row), "row")


def _plain_of(kind: Any, row: Any) -> Any:
    """Return the plain data of a value from its row."""
    kind = _unwrap_optional(kind)
    if row is None:
        return None
    if isinstance(kind, type) and has_fields(kind):
        kinds = _kinds(kind)
        if not isinstance(row, list) or len(row) > len(kinds):
            message = f"a row of {kind.__name__} has at most {len(kinds)} values"
            raise RejectedError(message, code="invalid_message")
        return {
            name: _plain_of(each, item)
            for (name, each), item in zip(kinds.items(), row, strict=False)
        }
    if get_origin(kind) is tuple and isinstance(row, list) and get_args(kind)[-1] is Ellipsis:
        return [_plain_of(get_args(kind)[0], item) for item in row]
    return row


@cache
def _unwrap_optional(kind: Any) -> Any:
    """Return X for `X | None`."""
    options = [option for option in get_args(kind) if option is not NoneType]
    return options[0] if NoneType in get_args(kind) and len(options) == 1 else kind


@cache
def _kinds(cls: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, by its name in bytes."""
    hints = get_type_hints(cls)
    return {wire_name(each): hints[each.name] for each in fields(cls)}


def _spell_kind(kind: Any) -> str:
    kind = _unwrap_optional(kind)
    if isinstance(kind, type) and has_fields(kind):
        defaults = {wire_name(each): each.default for each in fields(kind)}
        columns = [
            f"{name}:{_spell_kind(each)}{'' if defaults[name] is MISSING else defaults[name]}"
            for name, each in _kinds(kind).items()
        ]
        return f"({','.join(columns)})"
    if get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis:
        return f"[{_spell_kind(get_args(kind)[0])}]"
    return ""


COLUMNS: Final = xxh32_intdigest(_spell_kind(AgentView).encode())
