"""Hostile HTTP from valid requests: changed bytes, headers, JSON, lengths, chunks and sending."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fabric.hosting.limits import HEAD_BYTES_MAX, HEADERS_MAX, URL_BYTES_MAX
from fabric.limits import BODY_BYTES_MAX, KIB, MIB
from tests.fuzz.mutation import mutate_bytes, mutate_tree

PATHS = [
    *("/healthz", "/metrics", "/v1/models", "/v1/models/recall", "/v1/nodes", "/v1/agents"),
    *("/v1/agents/x", "/v1/agents/%00", "/v1/agents/a%2Fb", "/v1/nodes/only/flush", "/v1/none"),
    *("/v1/responses/resp_1", "/v1/responses/resp_1/input_items", "/v1/embeddings", "/health", "/"),
    *("/internal/generate", "/internal/control", "/internal/hibernate", "/internal/resume", "*"),
    *("//", "/v1/../healthz", "http://elsewhere/v1/models", "/v1/agents/x?replace=maybe&node=%ff"),
]
METHODS = ["GET", "GET", "GET", "GET", "DELETE", "HEAD", "OPTIONS", "PUT", "get", "PRI"]
VERBS = ["migrate", "fork", "replicate", "prefetch", "pin", "hibernate", "resume", "none"]
HEADERS = [
    *("host: [", "host: elsewhere", "origin: http://[", "origin: null", "x-agent-id: ~", "a:b"),
    *("x-agent-id: \xff", "x-macfabric-prefetch: a,b,c,d,e", "x-macfabric-priority: \x7f"),
    *("content-length: -1", "content-length: +1", "content-length: 1, 1", "content-length: 0x1"),
    *("transfer-encoding: gzip, chunked", "transfer-encoding: identity", "te: trailers"),
    *("transfer-encoding : chunked", "transfer-encoding:\tchunked", " folded", "\tfolded"),
    *("connection: upgrade", "upgrade: websocket", "upgrade: h2c", "expect: 100-continue"),
    *("expect: 200-ok", "x-macfabric-signing-key: zz", "x-macfabric-call: ff", "range: bytes=0-"),
    *("content-encoding: gzip", "content-type: text/plain", "authorization: Basic x", ": empty"),
    *("x-macfabric-edits: splice", "x-macfabric-policies: keep_all,,\xff"),
    *("x-forwarded-for: 127.0.0.1", "sec-fetch-site: cross-site", "no colon", "x: \x00", "x: \r"),
]
OWN = {
    "edits": "amortize",
    "policies": [
        "strip_thinking",
        {"name": "truncate_older_than", "options": {"n": 1, "max_chars": 100, "tools": ["f"]}},
        "drop_failed_tool_calls",
        {"name": "summarize_to_stub", "options": {"turns": 1, "steps": 1, "every": 1}},
    ],
}
CHAT = {
    "model": "recall",
    "max_tokens": 1,
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "logit_bias": {"5": 1},
    "stop": ["a"],
    "user": "u",
    "temperature": 0.5,
    "top_p": 0.9,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "metadata": {"user_id": "u"},
    "chat_template_kwargs": {"x": 1},
    "macfabric": OWN,
}
MESSAGES = {
    "model": "recall",
    "max_tokens": 1,
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "x", "is_error": True},
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "system", "content": "now"},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}, "type": "custom"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low"},
    "stop_sequences": ["a"],
    "metadata": {"user_id": '{"session_id": "s"}'},
    "temperature": 0.5,
    "top_k": 3,
    "stream": True,
    "context_management": {
        "edits": [
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "tool_uses", "value": 1},
                "keep": {"type": "tool_uses", "value": 0},
                "clear_at_least": {"type": "input_tokens", "value": 1},
                "exclude_tools": ["g"],
                "clear_tool_inputs": True,
            },
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
        ]
    },
    "macfabric": OWN,
}
RESPONSES = {
    "model": "recall",
    "max_output_tokens": 1,
    "instructions": "be brief",
    "input": [
        {"role": "developer", "content": "hello"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "eA=="},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "c", "format": {"type": "text"}},
        {"type": "namespace", "name": "n", "description": "", "tools": []},
        {"type": "web_search"},
    ],
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "text": {"verbosity": "low"},
    "store": True,
    "stream": True,
    "prompt_cache_key": "s",
    "truncation": "auto",
    "macfabric": OWN,
}
TURNS = {
    "/v1/responses": RESPONSES,
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
}
VERB = {
    "to": "only",
    "as": "y",
    "keep": True,
    "pinned": True,
    "drop_hot": True,
    "operation": "12345678",
}


KEPT_BYTES = 8 * MIB  # of an unauthorized body that never ends: even a few must not be buffered


@dataclass(frozen=True)
class Hostile:
    """Parts of a request, its receiver, and whether the sender hangs up at once."""

    parts: list[bytes]
    to_node: bool
    hangs_up: bool
    is_excessive: bool  # the first request's head is over a limit
    is_strange: bool  # the sender has no access there


@dataclass(frozen=True)
class _Request:
    raw: bytes
    is_excessive: bool


def hostile(rng: random.Random, key: str) -> Hostile:
    """Build the requests of one connection."""
    if rng.random() < 0.06:
        return _stranger(rng)
    count = rng.choice((1, 1, 1, 1, 2, 3, 30))
    requests = [_request(rng, key) for _ in range(count)]
    raw = b"".join(request.raw for request in requests)
    is_excessive = requests[0].is_excessive
    if rng.random() < 0.15:
        raw = mutate_bytes(rng, raw, [raw, b"\r\n\r\n", b"GET / HTTP/1.1\r\n"])
        is_excessive = False  # unknown after the mutation
    if rng.random() < 0.1:
        raw = raw[: rng.randrange(len(raw) + 1)]
    to_node = rng.random() < 0.25  # which serves no request without the cluster's secret
    return Hostile(_parts(rng, raw), to_node, rng.random() < 0.1, is_excessive, to_node)


def _stranger(rng: random.Random) -> Hostile:
    """Begin a long body with an invalid key, and never finish it."""
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: 127.0.0.1", "authorization: Bearer none"]
    chunks = rng.random() < 0.5
    length_header = "transfer-encoding: chunked" if chunks else f"content-length: {BODY_BYTES_MAX}"
    head = "\r\n".join([*lines, length_header, "", ""]).encode()
    body = (b"%x\r\n" % BODY_BYTES_MAX if chunks else b"") + b'{"x":"' + b"y" * KEPT_BYTES
    return Hostile(
        [head + body], rng.random() < 0.25, hangs_up=False, is_excessive=False, is_strange=True
    )


def _request(rng: random.Random, key: str) -> _Request:
    is_odd = rng.random() < 0.6  # as HTTP; the others reach the application

    def one_of(usual: Any, *others: Any) -> Any:
        return rng.choice((usual, *others)) if is_odd else usual

    paths = [*PATHS, *(f"/v1/agents/x/{verb}" for verb in VERBS), *[*TURNS] * 4]
    path = rng.choice(paths)
    body = _body(rng, TURNS.get(path, CHAT))
    path += one_of("", *[""] * 40, "?" + "y" * URL_BYTES_MAX)
    method = "POST" if body else rng.choice(METHODS)
    version = one_of(*["HTTP/1.1"] * 8, "HTTP/1.0", "HTTP/9.9", "x")
    lines = [f"{method} {path} {version}", "host: 127.0.0.1"]
    if rng.random() < 0.8:
        lines.append(f"authorization: Bearer {key}")
    lines += rng.choices(HEADERS, k=one_of(0, 0, 0, 1, 2))
    lines += [f"x{i}: {'y' * rng.choice((1, 700))}" for i in range(one_of(0, 0, 0, 0, 120))]
    lines += [f"x: {'y' * one_of(*[1] * 9, HEAD_BYTES_MAX)}"]
    chunks = rng.random() < 0.2
    if body and chunks:
        lines.append("transfer-encoding: chunked")
        body = _chunked(rng, body, one_of)
    if body and (not chunks or one_of(*[False] * 9, True)):
        length = len(body) + one_of(*[0] * 12, 1, -1, 1000, 10**9, 10**30)
        lines.append(f"content-length: {length}")
    end = one_of(*["\r\n"] * 20, "\n", "\r")
    head = (end.join(lines) + end + end).encode("latin-1")
    is_over = len(lines) > HEADERS_MAX + 1 or len(path) > URL_BYTES_MAX
    is_over |= len(head) > HEAD_BYTES_MAX + len(path) + KIB
    return _Request(head + body, is_over and end == "\r\n")


def _body(rng: random.Random, turn: dict[str, Any]) -> bytes:
    kind = rng.random()
    if kind < 0.2:
        return b""
    if kind < 0.5:
        return json.dumps(turn).encode()
    if kind < 0.58:
        return json.dumps(mutate_tree(rng, turn), default=str).encode("utf-8", "surrogatepass")
    if kind < 0.66:
        return json.dumps(mutate_tree(rng, VERB), default=str).encode("utf-8", "surrogatepass")
    if kind < 0.74:
        return mutate_bytes(rng, json.dumps(turn).encode(), [b"[]", b'{"a":'])
    if kind < 0.78:
        return json.dumps(turn).encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7")))
    fill = rng.choice((b"[", b"[],", b'{"":0},', b'"",', b"9", b" ", b"\\", b'"', b"\xff", b"1e9,"))
    return rng.choice((b"", b'{"x":', b"[")) + fill * (rng.choice((10, 1000, 300_000)) // len(fill))


def _chunked(rng: random.Random, body: bytes, one_of: Callable[..., Any]) -> bytes:
    out = bytearray()
    size = rng.choice((1, 7, 100, len(body)))
    wrong = one_of(None, rng.randrange(len(body)))
    for at in range(0, len(body), size):
        part, more = body[at : at + size], b""
        size_claimed = len(part)
        if wrong is not None and at <= wrong < at + size:
            size_claimed += rng.choice((0, 1, 1 << 40))
            more = rng.choice((b";x=y", b" ", b"g"))
        out += b"%x" % size_claimed + more + b"\r\n" + part + b"\r\n"
    tail = one_of(*[b""] * 6, b"x: y\r\n", b"x: y\r\n" * 200, b"content-length: 5\r\n")
    return bytes(out) + b"0\r\n" + tail + b"\r\n"


def _parts(rng: random.Random, raw: bytes) -> list[bytes]:
    if rng.random() < 0.7 or len(raw) < 2:
        return [raw]
    cuts = sorted(rng.randrange(len(raw)) for _ in range(rng.choice((1, 2, 20))))
    return [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
