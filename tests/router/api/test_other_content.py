"""Conversations with unsupported content are read, in every dialect and position."""

import base64
import itertools
import json

import pytest

from fabric.errors import RejectedError
from fabric.turn.messages import MessageRole
from router.admin.generate import GENERATE_BODY
from router.anthropic.content import Notes
from router.anthropic.request import PROMPT_BODY, parse_request, requested_prompt
from router.http.turn_headers import ignored_header
from router.limits import (
    IGNORED_HEADER_CHARS_MAX,
    PLACEHOLDER_INPUT_CHARS_MAX,
    PLACEHOLDER_NAME_CHARS_MAX,
)
from router.openai.chat_request import parse_chat
from router.openai.responses.request import parse_responses
from tests.router.counting_node import CountingNode
from tests.router.fake_node import MODEL
from tests.router.rig import rig
from tests.support.conversations import template_messages

PIXELS = base64.b64encode(bytes(range(256)) * 40).decode()
PNG = f"data:image/png;base64,{PIXELS}"
OMITTED = "omitted: this model reads text only]"
IMAGE, AUDIO = f"[image {OMITTED}", f"[audio {OMITTED}"
PDF = {"type": "base64", "media_type": "application/pdf", "data": PIXELS}
# Part → text that replaces it in the prompt.
PARTS = [
    ({"type": "image_url", "image_url": {"url": PNG, "detail": "high"}}, IMAGE),
    ({"type": "image_url", "image_url": "https://example.org/a.png?token=1"}, IMAGE),
    ({"type": "input_image", "image_url": PNG, "detail": "auto"}, IMAGE),
    ({"type": "input_image", "file_id": "file-1"}, IMAGE),
    ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXELS}},
     IMAGE),
    ({"type": "image", "source": {}}, IMAGE),
    ({"type": "input_audio", "input_audio": {"data": PIXELS, "format": "wav"}}, AUDIO),
    ({"type": "output_audio", "data": PIXELS, "transcript": "Good morning."}, "Good morning."),
    ({"type": "video_url", "video_url": {"url": "https://example.org/a"}}, f"[video {OMITTED}"),
    ({"type": "file", "file": {"filename": "a.pdf", "file_data": PNG}}, f"[file a.pdf {OMITTED}"),
    ({"type": "input_file", "filename": "b.pdf", "file_data": PIXELS}, f"[file b.pdf {OMITTED}"),
    ({"type": "input_file", "file_url": "https://example.org/c.pdf"}, f"[file {OMITTED}"),
    ({"type": "input_file", "filename": "d.txt", "file_data":
      "data:text/plain;base64," + base64.b64encode("größer".encode()).decode()}, "größer"),
    ({"type": "container_upload", "file_id": "file-2"}, f"[file file-2 {OMITTED}"),
    ({"type": "document", "source": PDF, "title": "Prices"}, f"[document Prices {OMITTED}"),
    ({"type": "document", "source": PDF}, f"[document {OMITTED}"),
    ({"type": "document", "title": "Prices", "source":
      {"type": "text", "media_type": "text/plain", "data": "It costs 9."}}, "Prices\nIt costs 9."),
    ({"type": "document", "source": {"type": "content", "content":
      [{"type": "text", "text": "It costs 9."}, {"type": "image", "source": {}}]}},
     f"It costs 9.\n{IMAGE}"),
    ({"type": "search_result", "source": "https://example.org", "title": "Prices",
      "content": [{"type": "text", "text": "It costs 9."}]},
     "Prices\nhttps://example.org\nIt costs 9."),
    ({"type": "tool_reference", "tool_name": "read_file"}, "[tool: read_file]"),
    ({"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search",
      "input": {"query": "mac studio"}}, '[call of web_search: {"query": "mac studio"}]'),
    ({"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [
        {"type": "web_search_result", "url": "https://example.org", "title": "Prices",
         "encrypted_content": PIXELS, "page_age": "1 day"}]},
     "[result of web_search]\nPrices\nhttps://example.org"),
    ({"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content":
      {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}},
     "[result of web_search]\nmax_uses_exceeded"),
    ({"type": "web_fetch_tool_result", "tool_use_id": "srvtoolu_2", "content":
      {"type": "web_fetch_result", "url": "https://example.org", "content":
       {"type": "document", "source": {"type": "text", "data": "Hello."}}}},
     "[result of web_fetch]\nhttps://example.org\nHello."),
    ({"type": "code_execution_tool_result", "tool_use_id": "srvtoolu_3", "content":
      {"type": "code_execution_result", "stdout": "4\n", "stderr": "", "return_code": 0,
       "content": [{"type": "code_execution_output", "file_id": "file-3"}]}},
     "[result of code_execution]\n4\n"),
    ({"type": "bash_code_execution_tool_result", "tool_use_id": "srvtoolu_4", "content":
      {"type": "bash_code_execution_result", "stdout": "", "stderr": "", "return_code": 0}},
     f"[result of bash_code_execution {OMITTED}"),
    ({"type": "tool_search_tool_result", "tool_use_id": "srvtoolu_5", "content":
      {"type": "tool_search_tool_search_result", "tool_references":
       [{"type": "tool_reference", "tool_name": "look"}]}},
     "[result of tool_search]\n[tool: look]"),
    ({"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "echo", "server_name": "s",
      "input": {"b": 1, "a": 2}}, '[call of echo: {"a": 2, "b": 1}]'),
    ({"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": False,
      "content": [{"type": "text", "text": "Hello."}]}, "[result of mcp]\nHello."),
    ({"type": "compaction", "content": "They spoke of prices."}, "They spoke of prices."),
    ({"type": "hologram", "data": PIXELS}, f"[hologram {OMITTED}"),
    ({"type": "future_text", "text": "Hello."}, "Hello."),
]  # fmt: skip
WHOLE_TEXTS = ("Good morning.", "größer", "Prices\nIt costs 9.", f"It costs 9.\n{IMAGE}",
               "Prices\nhttps://example.org\nIt costs 9.")  # fmt: skip
ITEMS = [
    ({"type": "web_search_call", "id": "ws_1", "status": "completed",
      "action": {"type": "search", "query": "mac studio"}},
     '[call of web_search: {"query": "mac studio", "type": "search"}]'),
    ({"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["prices"],
      "results": [{"filename": "a.txt", "file_id": "f", "text": "It costs 9."}]},
     '[call of file_search: ["prices"]]\na.txt\nIt costs 9.'),
    ({"type": "computer_call", "call_id": "c", "action": {"type": "click", "x": 1}},
     '[call of computer: {"type": "click", "x": 1}]'),
    ({"type": "computer_call_output", "call_id": "c",
      "output": {"type": "computer_screenshot", "image_url": PNG}},
     f"[result of computer]\n{IMAGE}"),
    ({"type": "image_generation_call", "id": "ig_1", "result": PIXELS}, IMAGE),
    ({"type": "code_interpreter_call", "id": "ci_1", "code": "print(4)",
      "outputs": [{"type": "logs", "logs": "4"}, {"type": "image", "url": PNG}]},
     f"[call of code_interpreter: print(4)]\n4\n{IMAGE}"),
    ({"type": "local_shell_call", "call_id": "l", "action": {"type": "exec", "command": ["ls"]}},
     '[call of local_shell: {"command": ["ls"], "type": "exec"}]'),
    ({"type": "local_shell_call_output", "id": "l", "output": "a.txt"},
     "[result of local_shell]\na.txt"),
    ({"type": "shell_call_output", "call_id": "s", "output":
      [{"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
     "[result of shell]\na.txt"),
    ({"type": "mcp_call", "id": "mcp_1", "name": "echo", "server_label": "s", "arguments": "{}",
      "output": "Hello."}, "[call of echo: {}]\nHello."),
    ({"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": []},
     f"[mcp_list_tools {OMITTED}"),
    ({"type": "compaction", "encrypted_content": PIXELS}, f"[compaction {OMITTED}"),
]  # fmt: skip
PLACES = ("user", "only", "system", "assistant", "tool")


def chat(part, place):
    """Return a chat with the part, and the index of its message."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    user = {"role": "user", "content": "hi"}
    beside = [{"type": "text", "text": "See:"}, part]
    at, messages = {
        "user": (0, [{"role": "user", "content": beside}]),
        "only": (2, [user, {"role": "assistant", "content": "ok"},
                     {"role": "user", "content": [part]}]),
        "system": (0, [{"role": "system", "content": beside}, user]),
        "assistant": (1, [user, {"role": "assistant", "content": beside}, user]),
        "tool": (2, [user, {"role": "assistant", "tool_calls": [call]},
                     {"role": "tool", "tool_call_id": "c1", "content": beside}]),
    }[place]  # fmt: skip
    read = parse_chat({}, {"model": "m", "messages": messages})
    return template_messages(read.prompt)[at]["content"], read.ignored


def generate(part, place):
    role = "user" if place == "only" else place
    content = [part] if place == "only" else [{"type": "text", "text": "See:"}, part]
    body = GENERATE_BODY.read({"messages": [{"role": role, "content": content}]})
    return template_messages(body.prompt())[0]["content"], body.ignored()


def responses(part, place):
    user = {"role": "user", "content": "hi"}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    beside = [{"type": "input_text", "text": "See:"}, part]
    output = {"type": "function_call_output", "call_id": "c1", "output": beside}
    at, items = {
        "user": (0, [{"role": "user", "content": beside}]),
        "only": (2, [user, {"role": "assistant", "content": "ok"},
                     {"type": "message", "role": "user", "content": [part]}]),
        "system": (0, [{"role": "developer", "content": beside}, user]),
        "assistant": (1, [user, {"role": "assistant", "content": beside}, user]),
        "tool": (2, [user, call, output]),
    }[place]  # fmt: skip
    read = parse_responses({}, {"model": "m", "input": items})
    return template_messages(read.prompt)[at]["content"], read.ignored


def anthropic_body(part, place):
    user = {"role": "user", "content": "hi"}
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    beside = [{"type": "text", "text": "See:"}, part]
    at, messages = {
        "user": (0, [{"role": "user", "content": beside}]),
        "only": (2, [user, {"role": "assistant", "content": "ok"},
                     {"role": "user", "content": [part]}]),
        "system": (1, [user, {"role": "system", "content": beside}]),
        "assistant": (1, [user, {"role": "assistant", "content": beside}, user]),
        "tool": (2, [user, {"role": "assistant", "content": [call]},
                     {"role": "user", "content": [
                         {"type": "tool_result", "tool_use_id": "c1", "content": beside}]}]),
    }[place]  # fmt: skip
    return at, {"model": "m", "max_tokens": 9, "messages": messages}


def messages(part, place):
    at, body = anthropic_body(part, place)
    read = parse_request({}, body)
    return template_messages(read.prompt)[at]["content"], read.ignored


def count_tokens(part, place):
    at, body = anthropic_body(part, place)
    notes = Notes()
    requested = requested_prompt(PROMPT_BODY.read(body), notes)
    return template_messages(requested.prompt)[at]["content"], tuple(notes.ignored)


DIALECTS = (chat, generate, responses, messages, count_tokens)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.__name__)
def test_unsupported_part_becomes_text_in_every_dialect_and_position(dialect, place):
    for part, text in PARTS:
        content, ignored = dialect(part, place)

        assert content == (text if place == "only" else f"See:\n{text}"), part["type"]
        assert ignored == (() if text in WHOLE_TEXTS else (part["type"],)), part["type"]
        assert dialect(part, place) == (content, ignored), "the same in every turn"


def test_text_after_placeholder_starts_on_new_line():
    picture, [image, _] = {"type": "image"}, PARTS[0]
    answer = [{"type": "text", "text": "I look."}, PARTS[20][0], picture,
              {"type": "text", "text": "It"}, {"type": "text", "text": " costs 9."}]  # fmt: skip
    read = parse_request({}, {"model": "m", "max_tokens": 9, "messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": answer},
        {"role": "user", "content": "ok"}]})  # fmt: skip
    expected = f"I look.\n{PARTS[20][1]}\n{IMAGE}\nIt costs 9."
    assert template_messages(read.prompt)[1]["content"] == expected
    parts = [{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}]
    read = parse_chat({}, {"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert template_messages(read.prompt)[0]["content"] == f"a\n{IMAGE}\nb"


@pytest.mark.parametrize(("item", "text"), ITEMS, ids=lambda x: str(x)[:40])
def test_hosted_tool_items_become_text(item, text):
    assistant = {"type": "message", "role": "assistant"}
    user = {"role": "user", "content": "hi"}
    items = [
        user,
        {**assistant, "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "reasoning", "summary": []},
        item,
        {**assistant, "content": [{"type": "output_text", "text": "It costs 9."}]},
        user,
    ]
    read = parse_responses({}, {"model": "m", "input": items})
    found = [(m["role"], m["content"]) for m in template_messages(read.prompt)]

    if item["type"].endswith("_call"):
        assert found == [
            ("user", "hi"),
            ("assistant", f"I look.\n{text}\nIt costs 9."),
            ("user", "hi"),
        ]
    else:
        assert [role for role, _ in found] == ["user", "assistant", "user", "assistant", "user"]
        assert found[2][1] == text
    assert read.ignored == (item["type"],)


def test_single_hosted_tool_item_is_a_valid_conversation():
    for item, text in ITEMS:
        read = parse_responses({}, {"model": "m", "input": [item]})
        [message] = template_messages(read.prompt)
        assert message["content"].strip() == text.strip()


def test_thinking_part_of_assistant_message_is_dropped():
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    content, ignored = chat(thought, "assistant")
    assert (content, ignored) == ("See:", ("thinking",))


def test_placeholders_are_bounded_for_long_names_and_inputs():
    long = "word " * 5_000
    blocks = [
        {"type": "document", "title": f"{long}\n{long}", "source": PDF},
        {"type": "server_tool_use", "name": long, "input": {"code": long}},
        {"type": "tool_reference", "tool_name": long},
        {"type": long},
        {"type": f"{long}_tool_result"},
        {"type": f"{long}_call"},
    ]
    for block in blocks:
        content, ignored = messages(block, "only")
        assert len(content) <= PLACEHOLDER_NAME_CHARS_MAX + PLACEHOLDER_INPUT_CHARS_MAX + 50
        assert "\n" not in content
        assert all(len(name) <= 64 for name in ignored)


def test_misplaced_blocks_are_rejected():
    for place, kind in itertools.product(("user", "tool"), ("tool_use", "thinking")):
        with pytest.raises(RejectedError) as refused:
            messages({"type": kind}, place)
        assert refused.value.code == "unsupported_content"
        assert f"'{kind}' does not belong here" in refused.value.message
    with pytest.raises(RejectedError):
        messages({"type": "tool_result", "tool_use_id": "c1"}, "assistant")


SEARCH = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    {"type": "web_search_preview"},
    {"type": "computer_use_preview", "display_width": 1024, "display_height": 768},
    {"type": "computer_20250124", "name": "computer"},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "mcp", "server_label": "s", "server_url": "https://example.org"},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "image_generation"},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
NESTED = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
USER = [{"role": "user", "content": "hi"}]


def read_tools(dialect, hosted):
    """Return the tools in the prompt and the ignored ones, for hosted tools beside a function."""
    if dialect == "messages":
        tools = [*hosted, {"name": "look", "input_schema": SCHEMA}]
        read = parse_request({}, {"model": "m", "max_tokens": 9, "messages": USER, "tools": tools})
        prompt, ignored = read.prompt, read.ignored
    elif dialect == "responses":
        tools = [*hosted, {"type": "function", "name": "look", "parameters": SCHEMA}]
        read = parse_responses({}, {"model": "m", "input": "hi", "tools": tools})
        prompt, ignored = read.prompt, read.ignored
    elif dialect == "chat":
        read = parse_chat({}, {"model": "m", "messages": USER, "tools": [*hosted, NESTED]})
        prompt, ignored = read.prompt, read.ignored
    else:
        body = GENERATE_BODY.read({"messages": USER, "tools": [*hosted, NESTED]})
        prompt, ignored = body.prompt(), body.ignored()
    return [tool["function"]["name"] for tool in prompt.tools], ignored


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "generate"])
def test_hosted_tools_are_dropped_and_listed_as_ignored(dialect):
    for tool in SEARCH:
        assert read_tools(dialect, [tool]) == (["look"], (tool["type"],))
    assert read_tools(dialect, SEARCH) == (["look"], tuple(tool["type"] for tool in SEARCH))


def test_allowed_tools_keep_functions_beside_hosted_tools():
    named = [{"type": "web_search"}, {"type": "function", "name": "look"}]
    read = parse_responses({}, {
        "model": "m", "input": "hi",
        "tools": [{"type": "web_search"}, {"type": "function", "name": "look"}],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": named},
    })  # fmt: skip
    assert read.prompt.calls.names == ("look",)


@pytest.mark.anyio
async def test_response_lists_ignored_content_streamed_and_unstreamed():
    picture = {"role": "user", "content": [PARTS[0][0]]}
    search, look = SEARCH[0], {"name": "look", "input_schema": SCHEMA}
    image = {"role": "user", "content": [PARTS[4][0]]}
    chats = {"messages": [picture], "tools": [SEARCH[1], NESTED]}
    claude = {"messages": [image], "tools": [search, look], "max_tokens": 9}
    seen = {"role": "user", "content": [{"type": "input_image", "image_url": PNG}]}
    items = {"input": [seen], "tools": [SEARCH[1]]}
    bodies = {
        "/v1/chat/completions": (chats, "web_search_preview, image_url"),
        "/v1/agents/{}/generate": (chats, "web_search_preview, image_url"),
        "/v1/messages": (claude, "image, web_search_20250305"),
        "/v1/messages/count_tokens": (claude, "image, web_search_20250305"),
        "/v1/responses": (items, "web_search_preview, input_image"),
    }
    async with rig(nodes=[CountingNode("node-a")]) as fabric:
        for path, (body, listed) in bodies.items():
            for stream in (False, True):
                sent = {"model": MODEL, **body} | ({"stream": True} if stream else {})
                answer = await fabric.http().post(path.format(f"mira-{stream}"), json=sent)
                assert answer.status_code == 200, (path, answer.text)
                assert answer.headers["x-macfabric-ignored"] == listed, path
        node = fabric["node-a"]
        requests = [*node.requests, *node.counted]
    assert {request.messages[-1].role for request in requests if request.messages} == {
        MessageRole.USER
    }
    assert {request.messages[-1].texts for request in requests if request.messages} == {(IMAGE,)}
    assert PIXELS not in json.dumps([str(request) for request in requests])


def test_ignored_header_is_bounded_and_counts_omitted_names():
    [text] = ignored_header(f"type_{index}" for index in range(1_000)).values()
    shown, _, rest = text.rpartition(", and ")
    assert len(text) <= IGNORED_HEADER_CHARS_MAX + 20
    assert int(rest.removesuffix(" more")) + len(shown.split(", ")) == 1_000
    assert ignored_header(["a", "b", "a"]) == {"x-macfabric-ignored": "a, b"}
    assert ignored_header([]) == {}
