"""A tiny HTTP endpoint that answers like a router and records its requests."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NODES = [
    {
        "name": "node-a",
        "host": "127.0.0.2",
        "pid": 41,
        "state": "ready",
        "model": "recall",
        "agents": 1,
        "tokens": 2048,
        "bytes": {"hot": 1048576, "disk": 524288},
        "addresses": [{"kind": "ethernet", "host": "192.168.1.10", "speed_mbit": 10000}],
        "self_test": {"passed": True, "detail": "came back", "seconds": 0.1},
        "degraded": None,
        "memory": {"pressure": "warning", "hot_limit_bytes": 2 << 30},
        "usage": {"disk_limit_bytes": 5 << 30},
        "active": 2,
        "waiting": 1,
        "prefill_tokens_per_s": 1200.4,
        "build": {"macfabric": "0.1.0"},
        "last_exit": {"at_s": 1.7e9, "cause": "killed", "detail": "by a signal", "lines": []},
    },
    {
        "name": "node-b",
        "host": "127.0.0.3",
        "pid": 42,
        "state": "draining",
        "model": "recall",
        "agents": 0,
        "tokens": 0,
        "bytes": {"hot": 0, "disk": 0},
        "addresses": [],
        "self_test": {"passed": False, "detail": "3 of 9 tokens differ", "seconds": 0.1},
        "degraded": "no space left",
    },
    {"name": "node-c", "state": "expired"},
]
AGENT = {
    "id": "mira",
    "object": "agent",
    "owner": "node-a",
    "state": "owned",
    "epoch": 3,
    "tokens": 2048,
    "blocks": 8,
    "bytes": {"hot": 1048576, "disk": 524288},
    "tiers": ["hot", "disk"],
    "last_match": {
        "kind": "extend",
        "cached_tokens": 2040,
        "prompt_tokens": 2060,
        "reason": "the stored text ends there",
    },
}
MOVED = {
    "id": "mira",
    "from": "node-a",
    "to": "node-b",
    "epoch": 4,
    "blocks_sent": 8,
    "blocks_reused": 1,
    "bytes_sent": 524288,
    "seconds": 0.12,
    "pause_seconds": 0.02,
}
RECEIPT = {
    "id": "mira",
    "deleted": True,
    "blocks_removed": 8,
    "bytes_removed": 524288,
    "receipts": [
        {
            "node": "node-a",
            "record_removed": True,
            "blocks_removed": 8,
            "bytes_removed": 524288,
            "blocks_kept_shared": 3,
        }
    ],
    "unreachable": [],
}
COPIED = {"blocks_sent": 3, "blocks_reused": 5, "bytes_sent": 2048, "seconds": 0.5}
FORKED = {"id": "ivan", "forked_from": "mira", "node": "node-a", "tokens": 2048, **COPIED}
REPLICA = {
    "id": "mira",
    "object": "agent.replica",
    "owner": "node-a",
    "node": "node-b",
    "kept": True,
    "tokens": 2048,
    **COPIED,
}
PREFETCHED = {
    "id": "mira",
    "object": "agent.prefetch",
    "node": "node-a",
    "tiers": ["hot", "disk"],
    "bytes": {"hot": 1048576, "disk": 524288},
}
DRAINED = {
    "node": "node-a",
    "state": "drained",
    "agents_moved": 7,
    "agents_left": 0,
    "bytes_sent": 524288,
    "seconds": 3.5,
    "stuck": [],
    "stuck_others": 0,
}
STUCK = {
    **DRAINED,
    "node": "node-b",
    "state": "stuck",
    "agents_left": 3,
    "stuck": [{"id": "mira", "code": "cannot_seal", "message": "the disk is full"}],
    "stuck_others": 2,
}
TURNS = [
    {
        "id": "req_2b1e5f0c",
        "at_s": 1789000100.0,
        "node": "node-b",
        "outcome": "stop",
        "cache": "disk",
        "match": "extend",
        "reason": "the stored text ends there",
        "not_hot": "its cache had been evicted from memory",
        "prompt_tokens": 2060,
        "cached_tokens": 2040,
        "fetched_tokens": 0,
        "completion_tokens": 30,
        "times": {
            "queue_s": 0.5,
            "move_s": 0.0,
            "prepare_s": 0.01,
            "fetch_s": 0.0,
            "load_s": 0.125,
            "prefill_s": 0.25,
            "decode_s": 2.0,
            "save_s": 0.05,
            "first_token_s": 0.885,
        },
    }
]
PINNED = {"id": "mira", "node": "node-a", "pinned": True, "pin_held": True}
USAGE = {
    "object": "list",
    "data": [
        {
            "object": "usage",
            "tenant": "one",
            "period": "hour",
            "start_s": 1767322800,
            "turns": 41,
            "broken_turns": 2,
            "refused_turns": 5,
            "prompt_tokens": 12000,
            "cached_tokens": 9000,
            "fetched_tokens": 0,
            "computed_tokens": 3000,
            "completion_tokens": 700,
            "compute_s": 61.5,
            "saved_s": 754.0,
        }
    ],
    "has_more": False,
    "limits": {"turns": 8, "tokens_per_minute": None, "running_turns": 3},
}
ANSWERS = {
    ("GET", "/healthz"): {"status": "degraded"},
    ("GET", "/v1/models"): {"object": "list", "data": [{"id": "recall", "object": "model"}]},
    ("GET", "/v1/router"): {"role": "sole", "problem": None},
    ("GET", "/v1/nodes"): {"object": "list", "data": NODES},
    ("GET", "/v1/events"): {"object": "none"},
    ("GET", "/v1/agents"): {"object": "list", "data": [AGENT, {"id": "new", "state": "owned"}]},
    ("GET", "/v1/agents?tenant=%2A"): {"object": "list", "data": [AGENT, AGENT, AGENT]},
    ("GET", "/v1/usage?period=hour"): USAGE,
    ("GET", "/v1/usage?period=day&tenant=one&limit=1"): USAGE,
    ("GET", "/v1/agents/mira"): AGENT,
    ("GET", "/v1/agents/mira/turns"): {"object": "list", "data": TURNS},
    ("GET", "/v1/agents/mira/turns?tenant=one"): {"object": "list", "data": TURNS},
    ("POST", "/v1/agents/mira/migrate"): MOVED,
    ("POST", "/v1/agents/mira/fork"): FORKED,
    ("POST", "/v1/agents/mira/replicate"): REPLICA,
    ("POST", "/v1/agents/mira/prefetch"): PREFETCHED,
    ("POST", "/v1/nodes/node-a/drain"): DRAINED,
    ("POST", "/v1/nodes/node-a/undrain"): {"node": "node-a", "state": "ready"},
    ("POST", "/v1/nodes/node-b/drain"): {**STUCK, "state": "draining"},
    ("POST", "/v1/nodes/node-c/drain"): {**DRAINED, "state": "draining"},
    ("POST", "/v1/agents/mira/pin"): PINNED,
    ("POST", "/v1/agents/ivan/pin"): {**PINNED, "pin_held": False},
    ("DELETE", "/v1/agents/mira"): RECEIPT,
    ("DELETE", "/v1/agents/ivan?runs=true"): {**RECEIPT, "removed_runs": ["debate-1"]},
    ("DELETE", "/v1/agents/ivan"): {
        **RECEIPT,
        "deleted": False,
        "unreachable": ["node-b"],
        "quoting_runs": ["debate-1"],
        "derived_agents": 2,
        "derived_tokens": 640,
    },
}

STATUSES: dict[tuple[str, str], int] = {}  # of answers that are not 200
NODES[1]["drain"] = STUCK  # the last state of `drain node-b`


class FakeFabric:
    """A server of ANSWERS on a free port; `key` is required if set, `page` replaces answers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, object]] = []
        self.key: str | None = None
        self.page: bytes | None = None
        self.media_type = "application/json"
        self.holds = False  # delay all answers until `close`
        self.streams: dict[str, list[bytes]] = {}  # growing event streams by path; b"" ends one
        self._closes = threading.Event()
        fabric = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fabric._answer(self)

            do_POST = do_DELETE = do_GET  # noqa: N815 - http.server calls them

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._closes.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("content-length", 0))
        body = json.loads(request.rfile.read(length)) if length else None
        self.requests.append((request.command, request.path, body))
        if self.holds:
            self._closes.wait(60)
            return
        if request.path in self.streams:
            self._stream(request)
            return
        answer = ANSWERS.get((request.command, request.path))
        status = STATUSES.get((request.command, request.path), 200) if answer else 404
        answer = answer or {"error": {"message": "no agent is called that"}}
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            status, answer = 401, {"error": {"message": "the key is unknown"}}
        raw = self.page if self.page is not None else json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("content-type", self.media_type)
        request.send_header("content-length", str(len(raw)))
        request.end_headers()
        request.wfile.write(raw)

    def _stream(self, request: BaseHTTPRequestHandler) -> None:
        """Send the frames of a stream, also those added later, until its end or `close`."""
        frames, sent = self.streams[request.path], 0
        request.send_response(200)
        request.send_header("content-type", "text/event-stream")
        request.end_headers()
        while not self._closes.wait(0.02):
            for part in frames[sent:]:
                if not part:
                    return
                request.wfile.write(part)
            sent = len(frames)
