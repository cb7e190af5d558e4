"""Every kind of answer, byte for byte as recorded: clients compare more than we expect.

`python -m tests.router.openai.test_answer_bytes` rewrites the file after an intended change.
"""

import asyncio
import json
import re
from pathlib import Path

import pytest

from fabric.errors import OverloadedError, RejectedError
from fabric.settings import RouterSettings
from fabric.turn.generation import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    TokenLogprob,
    ToolCall,
    ToolCalls,
)
from router.limits import CALL_BODY_BYTES_MAX
from tests.router.fake_node import MODEL
from tests.router.rig import KEY, rig

pytestmark = pytest.mark.anyio
PATH = Path(__file__).with_name("answer_bytes.json")
CHAT_BODY = {"model": MODEL, "messages": [{"role": "user", "content": "one two"}]}
RAW = {"model": MODEL, "prompt": "one two"}
STREAM = {"stream": True}
COUNTED = {"stream": True, "stream_options": {"include_usage": True}}
TOKEN = TokenLogprob("é", -0.5, (("é", -0.5), ("x", -1.5)))
LOGGED = (Delta(0, "é", logprobs=(TOKEN,)), Delta(1, ""), Finished(FinishReason.STOP, 2))
THOUGHT = (
    Delta(0, "hm", reasoning=True),
    Delta(1, "</yes>\n"),
    Finished(FinishReason.LENGTH, 2),
)
CALLED = (
    Delta(0, "Let me see."),
    ToolCalls((ToolCall("look", '{"at": "sky"}'), ToolCall("look", "{}"))),
    Finished(FinishReason.TOOL_CALLS, 9),
)
CALLED_ONLY = (*CALLED[1:],)
STOPPED = (Delta(0, "on"), Finished(FinishReason.STOP, 1, stop_string="e"))
BROKEN = (Delta(0, "on"), Failed(500, "engine_failed", "it broke"))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# name: method, path, body, the node's behaviour
CASES = {
    "chat": ("POST", CHAT, CHAT_BODY, None),
    "chat streamed": ("POST", CHAT, CHAT_BODY | STREAM, None),
    "chat streamed, counted": ("POST", CHAT, CHAT_BODY | COUNTED, None),
    "chat thinks": ("POST", CHAT, CHAT_BODY, THOUGHT),
    "chat thinks, streamed": ("POST", CHAT, CHAT_BODY | COUNTED, THOUGHT),
    "chat calls": ("POST", CHAT, CHAT_BODY, CALLED),
    "chat calls, streamed": ("POST", CHAT, CHAT_BODY | STREAM, CALLED),
    "chat only calls": ("POST", CHAT, CHAT_BODY, CALLED_ONLY),
    "chat with logprobs": ("POST", CHAT, CHAT_BODY | {"logprobs": True}, LOGGED),
    "chat with logprobs, streamed": ("POST", CHAT, CHAT_BODY | STREAM | {"logprobs": True}, LOGGED),
    "chat stops": ("POST", CHAT, CHAT_BODY, STOPPED),
    "chat breaks": ("POST", CHAT, CHAT_BODY, BROKEN),
    "chat breaks, streamed": ("POST", CHAT, CHAT_BODY | STREAM, BROKEN),
    "chat refused": (
        "POST",
        CHAT,
        CHAT_BODY,
        RejectedError("no", code="empty_prompt", param="messages"),
    ),
    "chat too busy": ("POST", CHAT, CHAT_BODY | STREAM, OverloadedError("no", retry_after_s=7.2)),
    "chat without a model": ("POST", CHAT, {}, None),
    "chat with no such model": ("POST", CHAT, CHAT_BODY | {"model": "gpt"}, None),
    "chat with a wrong hint": ("POST", CHAT, CHAT_BODY, None),
    "completion": ("POST", COMPLETIONS, RAW, None),
    "completion streamed": ("POST", COMPLETIONS, RAW | STREAM, None),
    "completion streamed, counted": ("POST", COMPLETIONS, RAW | COUNTED, None),
    "completion thinks": ("POST", COMPLETIONS, RAW, THOUGHT),
    "completion thinks, streamed": ("POST", COMPLETIONS, RAW | STREAM, THOUGHT),
    "completion calls": ("POST", COMPLETIONS, RAW, CALLED),
    "completion calls, streamed": ("POST", COMPLETIONS, RAW | STREAM, CALLED),
    "completion with logprobs": ("POST", COMPLETIONS, RAW | {"logprobs": 2}, LOGGED),
    "completion with logprobs, streamed": (
        "POST",
        COMPLETIONS,
        RAW | STREAM | {"logprobs": 2},
        LOGGED,
    ),
    "completion breaks, streamed": ("POST", COMPLETIONS, RAW | STREAM, BROKEN),
    "completion without a prompt": ("POST", COMPLETIONS, {"model": MODEL}, None),
    "models": ("GET", "/v1/models", None, None),
    "no such model": ("GET", "/v1/models/gpt", None, None),
    "no such path": ("GET", "/v1/nothing", None, None),
    "wrong method": ("GET", CHAT, None, None),
    "no JSON": ("POST", CHAT, b"{", None),
    "too long": ("POST", "/v1/agents/a/pin", b" " * (CALL_BODY_BYTES_MAX + 1), None),
    "no key": ("POST", CHAT, CHAT_BODY, None),
    "no such agent": ("GET", "/v1/agents/nobody", None, None),
}
_HEADERS_OF_THE_MOMENT = ("date", "request-id", "x-request-id")


def normalized(text):
    """Replace random ids and clock readings."""
    text = re.sub(r"\b(chatcmpl-|cmpl-|call_|req_)[0-9a-f]+", r"\1*", text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    return re.sub(r"127\.0\.0\.1:\d+", "HOST", text)


async def answers():
    """Send every request once, in order."""
    settings = RouterSettings(api_keys={"one": KEY}, loopback_without_key=False)
    async with rig("a", settings=settings, tended=False) as fabric:
        responses = {}
        for name in CASES:
            await fabric.fleet.membership.refresh()  # a slow machine must not let leases run out
            responses[name] = await answer(fabric, name)
        return responses


async def answer(fabric, name):
    method, path, body, does = CASES[name]
    node = fabric["node-a"]
    node.behaviour.events = list(does) if isinstance(does, tuple) else None
    node.behaviour.refuse = does if isinstance(does, Exception) else None
    content = body if isinstance(body, bytes) else json.dumps(body) if body is not None else None
    headers = {"x-agent-id": name.replace(" ", "-").replace(",", "")}
    if name == "chat with a wrong hint":
        headers["x-macfabric-prefetch"] = "../x"
    is_known = name != "no key"
    http = fabric.http(KEY if is_known else None, operates=is_known)
    response = await http.request(method, path, content=content, headers=headers)
    return {
        "status": response.status_code,
        "headers": [
            f"{key}: {normalized(value)}"
            for key, value in response.headers.multi_items()
            if key not in {*_HEADERS_OF_THE_MOMENT, "content-length"}
        ],
        "body": normalized(response.text),
    }


GOLDEN = json.loads(PATH.read_text()) if PATH.exists() else {}


async def test_answers_match_golden_bytes():
    found = await answers()

    assert list(found) == list(GOLDEN)
    for name, want in GOLDEN.items():
        assert found[name] == want, name


if __name__ == "__main__":
    PATH.write_text(json.dumps(asyncio.run(answers()), indent=1) + "\n")
