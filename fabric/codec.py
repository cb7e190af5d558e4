"""Strict conversion between frozen dataclasses and plain data, for msgpack and JSON.

The receiver names the type it expects; nothing in the bytes can choose a class. Unknown, missing or
wrongly typed fields, extension types and repeated keys are all refused. Only nodes' replies to a
router may have unknown fields: nodes are upgraded first.

A class with `to_wire` and `from_wire` defines its own encoding.

A field is encoded under its own name unless `on_wire` sets another, so code can rename a field
without changing stored or sent bytes.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Final, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from fabric.errors import CorruptDataError, RejectedError, TooLargeError
from fabric.json_items import require_few_items
from fabric.limits import CONTROL_BYTES_MAX, INTEGER_CHARS_MAX, JSON_DEPTH_MAX, JSON_ITEMS_MAX, KIB
from fabric.u32s import U32s

T = TypeVar("T")


_LONG_TEXT_CHARS = 64 * KIB
_PACK_BYTES = 512 * KIB  # one list of a long record, without a larger buffer and another copy
_WIRE = "wire"  # in a field's metadata: its name in bytes
_LEFT_OUT = "left_out"  # in a field's metadata: whether bytes lack it where it is None
# What is plain already; a record of a long context holds thousands.
_PLAIN = frozenset({bool, bytes, float, int, str, NoneType})


def on_wire(name: str) -> dict[str, Any]:
    """Set a field's name in bytes: `seconds: float = field(metadata=on_wire("age_s"))`."""
    return {_WIRE: name}


def left_out() -> dict[str, Any]:
    """Omit a field from the bytes if it is None, so that older versions can read them."""
    return {_LEFT_OUT: True}


def is_left_out(field: Field[Any]) -> bool:
    """Return whether the field is omitted from the bytes if it is None."""
    return _LEFT_OUT in field.metadata


def wire_name(field: Field[Any]) -> str:
    """Return a field's name in bytes."""
    name: str = field.metadata.get(_WIRE, field.name)
    return name


@cache
def wire_kind(cls: type) -> Any:
    """Return the type in bytes of a class with `to_wire` and `from_wire`."""
    return get_type_hints(cls.to_wire)["return"]  # type: ignore[attr-defined]


def to_plain(value: Any) -> Any:
    """Turn dataclasses, enums and tuples into dicts, strings and lists."""
    kind: type = type(value)
    if kind in _PLAIN:
        return value
    if kind is U32s:
        return value.pack()
    if _field_names(kind) is not None:
        items = ((name, getattr(value, attribute)) for name, attribute in _names_in(value))
        return {name: x if type(x) in _PLAIN else to_plain(x) for name, x in items}
    if isinstance(value, Enum):
        return value.value
    if _has_own_encoding(kind):
        return to_plain(value.to_wire())
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def has_fields(kind: type) -> bool:
    """Return whether a type is a dataclass that is encoded field by field."""
    return _field_names(kind) is not None


@cache
def _field_names(cls: type) -> tuple[tuple[str, str], ...] | None:
    """Pair each field's name in bytes with its attribute name; None for a type without fields."""
    if not is_dataclass(cls) or _has_own_encoding(cls):
        return None
    names = tuple((wire_name(field), field.name) for field in fields(cls))
    assert len(dict(names)) == len(names), "no two fields share a name in bytes"
    return names


@cache
def _optional_names(cls: type) -> frozenset[str]:
    """Return the fields that are omitted from the bytes if they are None."""
    return frozenset(field.name for field in fields(cls) if is_left_out(field))


def _names_in(value: Any) -> tuple[tuple[str, str], ...]:
    """Pair name in bytes and attribute name of each field that a value's bytes contain."""
    kind: type = type(value)
    names, optional = _field_names(kind) or (), _optional_names(kind)
    if not optional:
        return names
    return tuple(
        pair for pair in names if pair[1] not in optional or getattr(value, pair[1]) is not None
    )


@cache
def _has_own_encoding(cls: type) -> bool:
    return hasattr(cls, "from_wire")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _refuse(where: str, why: str) -> RejectedError:
    return RejectedError(f"{where}: {why}", code="invalid_message", param=where)


def _scalar(kind: type, value: Any, where: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _refuse(where, f"expected {kind.__name__}, got {type(value).__name__}")
    if isinstance(value, float) and not isfinite(value):
        raise _refuse(where, "expected a finite number")
    return value


def _union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and NoneType in options:
        return None
    rest = [option for option in options if option is not NoneType]
    for option in rest[:-1]:
        try:
            return from_plain(option, value, where)
        except RejectedError:
            continue
    return from_plain(rest[-1], value, where)


@dataclass(frozen=True, slots=True)
class _Field:
    name: str  # the class's own
    kind: Any
    plain: type | None  # the value's type, where nothing else must be checked
    has_items: bool  # of one kind, in a tuple: most lists of an event are empty
    is_required: bool


@cache
def _fields_of(cls: type) -> dict[str, _Field]:
    """Return the checks of a message type, computed once: frames arrive by the thousand."""
    hints = _hints(cls)
    return {
        wire_name(field): _Field(
            field.name,
            hints[field.name],
            _plain_type(hints[field.name]),
            get_origin(hints[field.name]) is tuple and get_args(hints[field.name])[-1] is ...,
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(cls)
    }


def _plain_type(kind: Any) -> type | None:
    while isinstance(kind, NewType):
        kind = kind.__supertype__
    return kind if kind in _PLAIN and kind is not float else None


def _dataclass(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _refuse(where, f"expected a map, got {type(value).__name__}")
    known_fields = _fields_of(cls)
    arguments = {}
    for name, item in value.items():
        field = known_fields.get(name)
        if field is None:
            raise _refuse(where, f"has an unknown field {name!r:.80}")
        if type(item) is field.plain:  # never a float: it may be infinite
            arguments[field.name] = item
        elif field.has_items and item == []:
            arguments[field.name] = ()
        else:
            arguments[field.name] = from_plain(field.kind, item, f"{where}.{name}")
    if len(arguments) < len(known_fields):
        for name, field in known_fields.items():
            if field.is_required and field.name not in arguments:
                raise _refuse(f"{where}.{name}", "is missing")
    return cls(**arguments)


def from_newer(kind: Any, value: Any, where: str = "message") -> Any:
    """Build a `kind` from plain data that a newer version may have written.

    Fields unknown to this version are skipped; raise RejectedError as `from_plain`.
    """
    try:
        return from_plain(kind, value, where)
    except RejectedError:
        known_value = known_part(kind, value)
        if known_value == value:
            raise
        return from_plain(kind, known_value, where)


def known_part(kind: Any, value: Any) -> Any:
    """Return plain data without the fields that the dataclasses of a type lack."""
    if isinstance(kind, NewType):
        return known_part(kind.__supertype__, value)
    options = [option for option in get_args(kind) if option is not NoneType]
    if get_origin(kind) in (Union, UnionType) and len(options) == 1:
        return known_part(options[0], value)
    if isinstance(kind, type) and _field_names(kind) is not None and isinstance(value, dict):
        known_fields = _fields_of(kind)
        return {
            n: known_part(known_fields[n].kind, item)
            for n, item in value.items()
            if n in known_fields
        }
    if get_origin(kind) is dict and isinstance(value, dict):
        return {name: known_part(options[1], item) for name, item in value.items()}
    if get_origin(kind) in (tuple, list) and isinstance(value, list):
        is_pair = get_origin(kind) is tuple and options[-1] is not Ellipsis
        kinds = options if is_pair else [options[0]] * len(value)
        return [known_part(*pair) for pair in zip(kinds, value, strict=False)]
    return value


def with_fields(value: T, plain: Mapping[str, Any], where: str) -> T:
    """Return a dataclass with some fields replaced from plain data; raise RejectedError."""
    cls: type = type(value)
    known_fields = _fields_of(cls)
    changes = {}
    for name, item in plain.items():
        field = known_fields.get(name)
        if field is None:
            raise _refuse(where, f"has an unknown field {name!r:.80}")
        changes[field.name] = from_plain(field.kind, item, f"{where}.{name}")
    changed: T = replace(value, **changes)  # type: ignore[type-var]
    return changed


def _container(origin: Any, kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise _refuse(where, "expected a map with string keys")
        return {k: from_plain(kinds[1], item, where) for k, item in value.items()}
    if not isinstance(value, list):
        raise _refuse(where, f"expected a list, got {type(value).__name__}")
    if origin is tuple and kinds[-1] is not Ellipsis:
        if len(value) != len(kinds):
            raise _refuse(where, f"expected {len(kinds)} items, got {len(value)}")
        return tuple(from_plain(k, v, where) for k, v in zip(kinds, value, strict=True))
    if kinds[0] is int:  # token lists are long: one pass in C instead of a call per item
        if not set(map(type, value)) <= {int}:
            raise _refuse(where, "expected integers")
        return origin(value)
    return origin(from_plain(kinds[0], item, f"{where}[{i}]") for i, item in enumerate(value))


def _u32s(value: Any, where: str) -> U32s:
    try:
        return U32s.unpack(_scalar(bytes, value, where))
    except CorruptDataError as error:
        raise _refuse(where, error.message) from None


def from_plain(kind: Any, value: Any, where: str = "message") -> Any:
    """Build a `kind` from plain data; raise RejectedError that names the field."""
    if kind is Any:  # passes through unchanged: tool schemas, arguments
        return value
    if isinstance(kind, type):
        return _of_class(kind, value, where)
    if isinstance(kind, NewType):
        return from_plain(kind.__supertype__, value, where)
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _union(get_args(kind), value, where)
    return _container(origin, get_args(kind), value, where)


def _of_class(kind: type, value: Any, where: str) -> Any:
    if _field_names(kind) is not None:
        return _dataclass(kind, value, where)
    if kind is U32s:
        return _u32s(value, where)
    if _has_own_encoding(kind):
        spelled = from_plain(wire_kind(kind), value, where)
        try:
            return kind.from_wire(spelled)  # type: ignore[attr-defined]
        except CorruptDataError as error:
            raise _refuse(where, error.message) from None
    if issubclass(kind, Enum):
        with suppress(ValueError):
            member = kind(value)
            if type(member.value) is type(value):  # True and 1.0 equal 1
                return member
        raise _refuse(where, f"is not a {kind.__name__}")
    return _scalar(kind, value, where)


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise _refuse("message", "repeats a key")
    return out


def pack(value: Any) -> bytes:
    """Encode a dataclass as msgpack."""
    return bytes(msgpack.packb(to_plain(value), use_bin_type=True))


def pack_fields(value: Any, packed: Mapping[str, Sequence[bytes]]) -> bytes:
    """Encode a dataclass as `pack` does; the lists in `packed` have their items encoded already.

    They are named as in bytes.
    """
    packer = msgpack.Packer(use_bin_type=True, buf_size=_PACK_BYTES)
    names = _names_in(value)
    parts = [packer.pack_map_header(len(names))]
    for name, attribute in names:
        parts.append(packer.pack(name))
        if name in packed:
            parts += (packer.pack_array_header(len(packed[name])), *packed[name])
        else:
            parts.append(packer.pack(to_plain(getattr(value, attribute))))
    return b"".join(parts)


def unpack_plain(raw: bytes, limit_bytes: int = CONTROL_BYTES_MAX) -> Any:
    """Decode msgpack into plain data; raise RejectedError unless it is strictly valid."""
    if len(raw) > limit_bytes:
        message = f"message of {len(raw)} bytes is over the limit of {limit_bytes}"
        raise TooLargeError(message)
    try:
        return msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique,
            ext_hook=_refuse_extension,
        )
    except RejectedError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise _refuse("message", f"is not valid msgpack ({type(error).__name__})") from None


def unpack(kind: type[T], raw: bytes, limit_bytes: int = CONTROL_BYTES_MAX) -> T:
    """Decode msgpack into a `kind`; raise RejectedError for anything else."""
    built: T = from_plain(kind, unpack_plain(raw, limit_bytes))
    return built


def unpack_newer(kind: type[T], raw: bytes) -> T:
    """Decode msgpack into a `kind` as `unpack` does, and skip fields of newer versions."""
    built: T = from_newer(kind, unpack_plain(raw))
    return built


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise _refuse("message", f"carries extension type {code}")


def _depth_within(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return True
    return False


def _short_int(digits: str) -> int:
    if len(digits) > INTEGER_CHARS_MAX:
        message = f"the body holds an integer of more than {INTEGER_CHARS_MAX} digits"
        raise RejectedError(message, code="invalid_json")
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise _refuse("body", f"{name} is not valid JSON")


_TEXTS: Final = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)
# At each number a long text yields the GIL, and a long number is refused.
_LONG_TEXTS: Final = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_int=_short_int, object_pairs_hook=_unique
)
_COMPACT: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def parse_json(raw: bytes | str, items_max: int = JSON_ITEMS_MAX) -> Any:
    """Parse JSON from outside: no NaN, no repeated keys, bounded depth and number of values."""
    require_few_items(raw, items_max)
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        value = (_LONG_TEXTS if len(text) > _LONG_TEXT_CHARS else _TEXTS).decode(text)
    except RejectedError:
        raise
    except (ValueError, RecursionError) as error:
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        message = f"the body is not valid JSON{where}"
        raise RejectedError(message, code="invalid_json") from None
    is_flat = text.count("{") + text.count("[") < JSON_DEPTH_MAX
    if not is_flat and not _depth_within(value, JSON_DEPTH_MAX):
        message = f"the body is nested deeper than {JSON_DEPTH_MAX} levels"
        raise RejectedError(message, code="invalid_json")
    return value


def dump_json(value: Any) -> bytes:
    """Encode a dataclass or plain data as compact JSON."""
    return _COMPACT.encode(to_plain(value)).encode("utf-8", "surrogatepass")
