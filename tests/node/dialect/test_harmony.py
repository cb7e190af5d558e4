"""gpt-oss's channels: analysis is reasoning, final is text, commentary to a function is a call."""

import random
from copy import deepcopy

import pytest

from node.dialect.harmony import HarmonyReader
from tests.node.dialect.reading import TOOLS, Read, add, cut, read

THOUGHT = "<|channel|>analysis<|message|>Hm.\nSo.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Hi\n.<|return|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
    '{"at": "the sky"}<|call|>'
)
LOOK = ("look", {"at": "the sky"})
CASES = {
    "thought and text": (THOUGHT + FINAL, Read("Hi\n.", "Hm.\nSo.")),
    "text": ("<|channel|>final<|message|>Hi<|return|>", Read("Hi")),
    "no end": ("<|channel|>final<|message|>Hi", Read("Hi")),
    "cut thought": ("<|channel|>analysis<|message|>Hm", Read("", "Hm")),
    "cut header": (f"{THOUGHT}<|start|>assistant<|channel|>fin", Read("", "Hm.\nSo.")),
    "no header": ("Hello there", Read("Hello there")),
    "call": (THOUGHT + CALL, Read("", "Hm.\nSo.", [LOOK])),
    "call, without its end": (THOUGHT + CALL[:-8], Read("", "Hm.\nSo.", [LOOK])),
    "recipient in front": (
        " to=functions.look<|channel|>commentary json<|message|>" + '{"at": "the sky"}',
        Read("", "", [LOOK]),
    ),
    "preamble": (
        f"<|channel|>commentary<|message|>I look.<|end|>{CALL}",
        Read("I look.", "", [LOOK]),
    ),
    "marks in a value": (
        CALL.replace("the sky", "<|call|><|start|>"),
        Read("", "", [("look", {"at": "<|call|><|start|>"})]),
    ),
    "nothing to say": (
        "<|channel|>commentary to=functions.now<|message|><|call|>",
        Read("", "", [("now", {})]),
    ),
    "two thoughts": (
        f"{THOUGHT}<|start|>assistant{THOUGHT}{FINAL}",
        Read("Hi\n.", "Hm.\nSo.\n\nHm.\nSo."),
    ),
    "cut call": (
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": ',
        Read(begun=[("look", '{"at": ')], broken=1),
    ),
    "cut name": (
        "<|channel|>commentary to=functions.lo",
        Read("<|channel|>commentary to=functions.lo", broken=1),
    ),
    "stop": (
        THOUGHT.replace("Hm", "STOP") + FINAL.replace("Hi", "Hi STOP you"),
        Read("Hi ", "STOP.\nSo.", stopped_by="STOP"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_channels_are_read_the_same_in_any_pieces(name):
    says, wanted = CASES[name]
    rng = random.Random(name)
    ways = [[says], list(says)]
    ways += [cut(says, [rng.randrange(999) for _ in range(n)]) for n in (1, 2, 3, 5, 8, 13)]
    seen = [read(HarmonyReader(("STOP",), TOOLS, "o"), pieces) for pieces in ways]

    first = seen[0]
    assert (first.text, first.reasoning) == (wanted.text, wanted.reasoning)
    assert (first.calls, first.begun) == (wanted.calls, wanted.begun)
    assert (first.broken, first.stopped_by) == (wanted.broken, wanted.stopped_by)
    assert all(each == first for each in seen[1:])


@pytest.mark.parametrize("name", CASES)
def test_copied_reader_is_independent(name):
    says, _ = CASES[name]
    reader = HarmonyReader(("STOP",), TOOLS, "o")
    for char in says:
        ahead = deepcopy(reader, {id(TOOLS): TOOLS}).feed(char)
        assert ahead == reader.feed(char)


@pytest.mark.parametrize("name", CASES)
def test_restarted_reader_has_no_memory_of_earlier_text(name):
    says, _ = CASES[name]
    reader, plain = (HarmonyReader(("STOP",), TOOLS, "o") for _ in range(2))
    for earlier in (says, CALL, CALL[:-9]):
        reader.begin(earlier)
    reader.begin("")
    plain.begin("")
    assert read(reader, [says]) == read(plain, [says])


def test_answer_cut_within_a_call_header_shows_no_markup():
    seen = read(HarmonyReader((), TOOLS, "o"), list(CASES["cut name"][0]), is_cut=True)
    assert (seen.text, seen.broken) == ("", 1)


def test_arguments_are_streamed_before_their_end():
    reader, seen = HarmonyReader((), TOOLS, "o"), Read()
    for char in CALL[: CALL.index("the sky") + 5]:
        add(seen, reader.feed(char))

    assert list(seen.parts.values()) == [("look", '{"at": "the s')]


def test_call_is_text_without_tools():
    seen = read(HarmonyReader((), None, "o"), list(CALL))

    assert seen.calls == []
    assert '{"at": "the sky"}' in seen.text


def test_stop_strings_end_the_final_text_but_not_a_thought():
    reader = HarmonyReader(("So",), None, "")
    shown = [reader.feed(text) for text in (THOUGHT, FINAL[:-12], " And so. So on.")]
    assert "".join(each.reasoning for each in shown) == "Hm.\nSo."
    assert "".join(each.text for each in shown) == "Hi And so. "
    assert [each.stopped_by for each in shown] == [None, None, "So"]
