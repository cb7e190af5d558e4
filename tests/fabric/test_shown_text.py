"""Escaping of text for terminals: no control sequence remains; JSON keeps its meaning."""

import json
import unicodedata

import pytest

from fabric.shown_text import escape_block, escape_json, escape_line

ATTACKS = {
    "colour": "\x1b[31mred",
    "window title": "\x1b]0;owned\x07",
    "C1 control sequence": "\x9b31m",
    "overwritten line": "fine\rgone",
    "erased characters": "secret\x08\x08\x7f",
    "override": "\u202egnp.exe",
    "isolate": "\u2066a\u2069",
    "line separator": "a\u2028b\u2029c",
    "invisible": "a\u200bb\ufeffc\xadd",
    "language tags": "a\U000e0041",
    "lone surrogate": "a\ud800",
}
HARMLESS = ["", "plain", "Ünïcödé 漢字 עברית", "👩\u200d💻", r"back\slash", "a  b"]


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("escape", [escape_line, escape_block])
def test_control_characters_are_escaped(escape, name):
    shown = escape(ATTACKS[name])

    assert not any(unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"} for c in shown)
    assert shown.isprintable()
    assert escape(shown) == shown


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_is_unchanged(text):
    assert escape_line(text) == escape_block(text) == text


def test_only_blocks_keep_line_breaks():
    assert escape_line("a\n\tb") == r"a\n\tb"
    assert escape_block("a\n\tb\x1b") == "a\n\tb\\x1b"


def test_blocks_drop_color_sequences():
    assert escape_block("\x1b[1;31mred\x1b[0m \x1b[2J") == r"red \x1b[2J"


@pytest.mark.parametrize("text", [*ATTACKS.values(), *HARMLESS])
@pytest.mark.parametrize("indent", [None, 2])
def test_escaped_json_keeps_its_meaning(text, indent):
    document = escape_json(json.dumps({text: [text]}, ensure_ascii=False, indent=indent))

    assert json.loads(document) == {text: [text]}
    assert escape_block(document) == document
