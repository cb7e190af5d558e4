"""Names of fields in messages, records and settings, on which other programs rely.

A field may be renamed if `codec.on_wire` keeps its old name in bytes, and a field with a default
may be added. A failure here means a change that affects older peers, clients or stored files; if it
is intended, `python -m tests.formats.rewrite` rewrites the names.
"""

import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import pytest

from fabric.codec import wire_kind, wire_name
from fabric.control.calls import CALLS, ErrorReply, NamedMessage
from fabric.control.hibernation_calls import Hibernate, Resume, Resumed
from fabric.net import wire
from fabric.net.ticket import Ticket
from fabric.record.hibernation_file import HibernationHeader
from fabric.record.manifest import Manifest
from fabric.record.spec_file import SpecRecord
from fabric.record.tombstone import Tombstone
from fabric.settings import FabricSettings
from fabric.turn import generation
from fabric.u32s import U32s
from node.store.service_time import Served
from router.fleet.node_roster import NodeRoster

PATH = Path(__file__).with_name("wire_names.json")
GOLDEN: dict[str, Any] = json.loads(PATH.read_text())


def roots() -> Iterator[tuple[str, type]]:
    """List every type that is sent or stored, by its name there."""
    for name, spec in CALLS.items():
        yield f"call {name}", spec.message
        yield f"reply {name}", spec.reply
    yield from (("envelope", NamedMessage), ("error", ErrorReply))
    for number, (kind, _) in wire._KINDS.items():
        yield f"frame {number}", kind
    for name, event in generation._EVENTS.items():
        yield f"event {name}", event
    yield "generate", generation.GenerateRequest
    yield from (("hibernate", Hibernate), ("resume", Resume), ("resumed", Resumed))
    yield from (("record", Manifest), ("spec", SpecRecord), ("tombstone", Tombstone))
    yield from (("hibernation header", HibernationHeader), ("ticket", Ticket), ("served", Served))
    yield "roster", NodeRoster
    yield "settings", FabricSettings


def shape(kind: Any) -> Any:
    """Describe a type by the shape of its bytes, without names of classes."""
    if isinstance(kind, NewType):
        return shape(kind.__supertype__)
    if get_origin(kind) in (Union, UnionType):
        return ["or", *(shape(option) for option in get_args(kind))]
    if get_origin(kind) is not None:
        return [get_origin(kind).__name__, *(shape(item) for item in get_args(kind))]
    if hasattr(kind, "from_wire"):
        return shape(wire_kind(kind))
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return {_key(field): shape(hints[field.name]) for field in fields(kind)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ["one of", *sorted(member.value for member in kind)]
    if kind is Ellipsis:
        return "..."
    return {NoneType: "nil", U32s: "bytes", Any: "any"}.get(kind, kind.__name__)


def _key(field: Field[Any]) -> str:
    is_required = field.default is MISSING and field.default_factory is MISSING
    return wire_name(field) + ("" if is_required else "?")


def current() -> dict[str, Any]:
    """Describe every type of the present code."""
    return {name: shape(kind) for name, kind in roots()}


def missing(before: Any, now: Any, where: str) -> Iterator[str]:
    """Yield fields and values that were removed, changed or became required."""
    if isinstance(before, dict) and isinstance(now, dict):
        known, held = ({name.rstrip("?"): x for name, x in d.items()} for d in (before, now))
        yield from (f"{where}.{name} is gone" for name in known.keys() - held)
        for name in known.keys() & held:
            yield from missing(known[name], held[name], f"{where}.{name}")
        added = (name for name in now if name.rstrip("?") not in known and not name.endswith("?"))
        yield from (f"{where}.{name} is new and has no default" for name in added)
    elif isinstance(before, list) and isinstance(now, list) and before[0] == now[0] == "one of":
        yield from (f"{where} has no {value!r}" for value in before[1:] if value not in now)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for one, other in zip(before, now, strict=True):
            yield from missing(one, other, where)
    elif before != now:
        yield f"{where} was {json.dumps(before)[:60]}"


@pytest.mark.parametrize("name", list(GOLDEN))
def test_wire_names_stay_compatible(name: str) -> None:
    """Older data would be refused if a field were renamed, removed, changed or newly required."""
    assert list(missing(GOLDEN[name], current()[name], name)) == []


def test_every_message_is_listed() -> None:
    """New messages are added by `python -m tests.formats.rewrite`."""
    assert dict(roots()).keys() == GOLDEN.keys()
