"""Sampling fields that chats and completions share."""

import pytest

from fabric.limits import COMPLETION_TOKENS_MAX
from router.openai.chat_request import parse_chat
from router.openai.completion_request import parse_completion

SAYS = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_no_limit_and_no_stop_string_are_said_in_other_servers_ways(parse):
    def sampling(**fields):
        return parse({}, {"model": "m", **SAYS, **fields}).sampling

    assert sampling(max_tokens=-1).max_tokens == COMPLETION_TOKENS_MAX
    assert sampling(stop="").stop == sampling(stop=[""]).stop == ()
    assert sampling(stop=["a", ""]).stop == ("a",)
