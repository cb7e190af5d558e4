"""The table of control calls: names, routes, limits and messages."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from inspect import getmembers
from typing import Any, get_args, get_type_hints

import pytest

from fabric.control import erasure_calls, head_calls, node_calls, replica_calls, span_calls
from fabric.control.calls import (
    CALLS,
    NO_ORIGIN,
    CallOrigin,
    CallRoute,
    decode_call,
    encode_call,
    is_call,
    spec_of,
)
from fabric.control.head_calls import OfferHead
from fabric.control.node_calls import CommitMigration, Describe, Flush, SealAgent, Stop
from fabric.control.term_calls import GrantTerm
from fabric.errors import RejectedError
from fabric.ids import Traceparent, TurnId

SPECS = list(CALLS.values())


def nested_types(kind: Any) -> Iterator[type]:
    """List a class and the classes of its fields."""
    for part in get_args(kind):
        yield from nested_types(part)
    if is_dataclass(kind):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from nested_types(hint)


def test_call_table_lists_every_control_message_once():
    assert len({spec.message for spec in SPECS}) == len(SPECS)
    assert all(CALLS[spec.name] is spec is spec_of(spec.message) for spec in SPECS)
    known = {
        part for spec in SPECS for kind in (spec.message, spec.reply) for part in nested_types(kind)
    }
    for module in (erasure_calls, head_calls, node_calls, replica_calls, span_calls):
        defined = {kind for _, kind in getmembers(module, is_dataclass) if isinstance(kind, type)}
        unknown = {kind for kind in defined if kind.__module__ == module.__name__} - known
        assert not unknown, "neither a call, nor a reply, nor a part of one"


def test_only_calls_that_block_a_stream_go_by_http():
    by_http = {spec.message for spec in SPECS if spec.route is CallRoute.HTTP}
    expected = {SealAgent, CommitMigration, GrantTerm}
    assert by_http == expected, "these may arrive twice: they must be idempotent"


def test_nodes_call_each_other_only_for_heads():
    assert {spec.message for spec in SPECS if spec.route is CallRoute.PEER} == {OfferHead}


def test_lost_nodes_get_only_the_calls_that_recover_them():
    assert {spec.name for spec in SPECS if spec.to_lost} == {
        "describe",
        "describe_changes",
        "erase_agent",
        "grant_term",
        "share_erasures",
    }


def test_only_calls_independent_of_terms_are_open_to_any_router():
    assert {spec.name for spec in SPECS if spec.is_open} == {
        "describe",
        "describe_changes",
        "flush",
        "grant_term",
        "list_agents",
        "list_changes",
        "offer_head",
        "read_memory",
        "read_turns",
        "share_erasures",
        "stop",
    }


def test_call_carries_the_term_of_its_router():
    raw = encode_call(Flush(), 7)
    assert decode_call(raw) == (Flush(), CallOrigin(7))
    assert decode_call(encode_call(Flush())) == (Flush(), NO_ORIGIN)
    assert encode_call(Flush()) == encode_call(Flush(), None), "None is no term"
    assert b"term" not in encode_call(Flush())


def test_a_call_names_the_turn_that_it_is_made_for():
    trace = Traceparent(f"00-{'a' * 32}-{'b' * 16}-01")
    origin = CallOrigin(7, TurnId("turn-of-a-client"), trace)

    assert decode_call(encode_call(Flush(), origin=origin)) == (Flush(), origin)
    assert decode_call(encode_call(Flush(), 7)) == (Flush(), CallOrigin(7))


@pytest.mark.parametrize(
    "origin",
    [CallOrigin(turn="a b c d e f"), CallOrigin(trace="00-0-0-0"), CallOrigin(turn="\n" * 9)],
)
def test_an_invalid_origin_is_refused(origin):
    with pytest.raises(RejectedError):
        decode_call(encode_call(Flush(), origin=origin))


def test_every_call_has_a_timeout():
    assert all(0 < spec.timeout_s <= 3_600 for spec in SPECS)


def test_call_is_identified_by_its_name():
    raw = encode_call(Flush(drop_hot=True))
    assert decode_call(raw) == (Flush(drop_hot=True), NO_ORIGIN)
    assert is_call(raw, Flush)
    assert not is_call(raw, Stop)
    assert not is_call(b"\xc1", Stop)
    with pytest.raises(RejectedError, match="unknown control call"):
        decode_call(encode_call(Describe()).replace(b"describe", b"disclose"))
