"""Answers that end, or begin, within a call."""

import pytest

from tests.node.dialect.reading import marked, marked_reader, read

JSON = '<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>'
CUT = {
    "<tool_call>": "",
    'So.\n<tool_call>\n{"name": "loo': "So.",
    'So.\n<tool_call>\n{"name": "look", "arguments": {"at': "So.",
    "So. a <to": "So. a <to",
}


@pytest.mark.parametrize("says", CUT)
def test_answer_cut_within_a_call_shows_no_markup(says):
    for pieces in ([says], list(says)):
        seen = read(marked_reader(marked("json")), pieces, is_cut=True)
        assert seen.text == CUT[says]
        assert len(seen.begun) == ("arguments" in says)


def test_call_in_a_cut_thought_is_not_reported():
    reader = marked_reader(marked("json", "think"))
    seen = read(reader, [f"<think>Hm\n{JSON}"], is_cut=True)
    assert (seen.calls, seen.reasoning) == ([], f"Hm\n{JSON}")


def test_call_started_by_the_client_stays_text():
    reader = marked_reader(marked("json"), f'{JSON}<tool_call>{{"name": "look", "arguments": {{"at')
    seen = read(reader, ['": "the sky"}}', "</tool_call>"])
    assert (seen.text, seen.calls, seen.broken) == ('": "the sky"}}</tool_call>', [], 0)
