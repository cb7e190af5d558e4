"""The count of JSON values is exact for any formatting and any split into parts."""

import json
import random

import pytest

from fabric.codec import parse_json
from fabric.errors import RejectedError, TooLargeError
from fabric.json_items import ItemCount, require_few_items
from fabric.limits import JSON_ITEMS_MAX

TEXTS = ['"', "\\", '\\"', "[,{", ",", "a", "é", "\U0001f600", "\n", '","', "]}", "\\\\", "\u2022"]


def value(rng, depth=0):
    kind = rng.random()
    if depth > 5 or kind < 0.5:
        return rng.choice(["".join(rng.choices(TEXTS, k=rng.randint(0, 6))), 1, -2.5, None, True])
    if kind < 0.75:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 5))]
    return {f"{i}{rng.choice(TEXTS)}": value(rng, depth + 1) for i in range(rng.randint(0, 5))}


def structure(item):
    """Count containers and the commas between their items."""
    if isinstance(item, dict):
        item = list(item.values())
    if not isinstance(item, list):
        return 0
    return 1 + max(0, len(item) - 1) + sum(map(structure, item))


def parts(rng, raw):
    while raw:
        size = rng.choice([1, 1, 2, 3, 7, 50])
        yield raw[:size]
        raw = raw[size:]


@pytest.mark.parametrize("seed", range(300))
def test_item_count_equals_that_of_the_parsed_value(seed):
    rng = random.Random(seed)
    item = [value(rng) for _ in range(4)]
    raw = json.dumps(item, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])).encode(
        "utf-8", "surrogatepass"
    )
    count = ItemCount(10_000)
    for part in parts(rng, raw):
        count.feed(part)

    assert count._items == structure(item)
    assert not count._is_in_string


@pytest.mark.parametrize(
    "raw",
    [
        b'{"x":[' + b"[]," * JSON_ITEMS_MAX + b"0]}",
        b'{"x":[' + b"{}," * JSON_ITEMS_MAX + b"0]}",
        b'{"x":' + b"[" * JSON_ITEMS_MAX * 2,
        b'{"x":[' + b"1," * JSON_ITEMS_MAX + b"1]}",
        b'{"x":{' + b'"":0,' * JSON_ITEMS_MAX + b'"":1}}',
        b'"' * 8 * JSON_ITEMS_MAX,
        b'{"a":"\\\\",' + b"[]," * JSON_ITEMS_MAX,
        b'{"a":"\\\\\\"",' + b"[]," * JSON_ITEMS_MAX,
    ],
    ids=["arrays", "objects", "depth", "numbers", "keys", "quotes", "backslash", "escapes"],
)
def test_too_many_values_are_rejected_before_parsing(raw, monkeypatch):
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(TooLargeError) as error:
        parse_json(raw)
    with pytest.raises(TooLargeError):
        parse_json(raw.decode())

    assert (error.value.status, error.value.code) == (413, "too_many_values")


@pytest.mark.parametrize(
    "fill", [",", "[],{}", '\\"', "\\\\", "\\n,", '\\\\\\",[', "é,", "\U0001f600"]
)
def test_long_text_counts_as_one_value(fill):
    raw = '{"messages":[{"role":"user","content":"' + fill * ((4 << 20) // len(fill)) + '"}]}'
    require_few_items(raw, 10)
    require_few_items(raw.encode(), 10)

    assert parse_json(raw)["messages"][0]["role"] == "user"


def test_encodings_other_than_utf_8_are_rejected():
    for encoding in ("utf-16", "utf-32", "utf-16-le", "utf-8-sig"):
        with pytest.raises(RejectedError) as error:
            parse_json('{"a": "\u2200\u2c2c"}'.encode(encoding))
        assert error.value.code == "invalid_json"


def test_long_integers_are_rejected_in_long_bodies_only():
    pad = " " * (1 << 17)
    assert parse_json('{"a": %s}' % ("9" * 1000))["a"] == int("9" * 1000)
    assert parse_json(pad + '{"a": %s}' % ("9" * 300))["a"] == int("9" * 300)
    with pytest.raises(RejectedError) as error:
        parse_json(pad + '{"a": %s}' % ("9" * 1000))
    assert error.value.code == "invalid_json"
