"""A whole fabric in this process: real nodes, the real router, real HTTP and TCP; no Ray."""

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai

from fabric.control.node_calls import Done, Flush
from fabric.ids import NodeName
from fabric.keys import OPERATOR_HEADER
from fabric.limits import COMPLETION_TOKENS_MAX
from fabric.settings import RouterSettings
from node.service import NodeService
from router.fleet.node_client import ControlTransport, NodeLostError
from router.placement.choice import Policy
from router.placement.placement import Placement
from router.serve import serve_roster
from tests.support.services import KEY, call, start_service

REAL_UP = "MACFABRIC_TESTS_ON_UP"  # "http" or "https": run the tests on a real `macfabric up`
OPERATOR_KEY = "key-of-the-operator-of-tests"


@dataclass
class Answer:
    """A chat answer with its headers and usage."""

    text: str
    agent: str
    node: str
    cache: str
    match: str
    cached_tokens: int
    prompt_tokens: int
    epoch: int
    finish_reason: str
    raw: dict[str, Any] = field(repr=False, default_factory=dict)


class LocalFabric:
    """Nodes that can be restarted, and a router that discovers them."""

    def __init__(
        self,
        folder: Path,
        model: str,
        names: list[str],
        api_keys: dict[str, str] | None = None,
        tokens_max: int = COMPLETION_TOKENS_MAX,
        router: dict[str, Any] | None = None,
        policy: Policy = Policy.SECONDS,
        **settings: Any,
    ) -> None:
        self._policy = policy
        self._folder = folder
        self.runs_dir = folder / "runs"  # of the router
        self.router_settings = RouterSettings(
            takeover_after_s=1.0,
            api_keys=api_keys or {},
            operator_keys={"ops": OPERATOR_KEY},
            completion_tokens_max=tokens_max,
            **(router or {}),
        )
        self._model = model
        self._settings = settings
        self._down: set[str] = set()
        self._port = 0  # any, at first
        self.services: dict[str, NodeService] = {n: self._start(n) for n in names}
        self._start_router()

    def _start_router(self) -> None:
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(60), "the router did not become ready"
        self.http = httpx2.Client(
            base_url=self.url, timeout=120, headers={OPERATOR_HEADER: OPERATOR_KEY}
        )
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def _start(self, name: str) -> NodeService:
        return start_service(self._folder, self._model, name, **self._settings)

    def _serve(self) -> None:
        listener = socket.create_server(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        work = serve_roster(
            self.router_settings,
            KEY,
            self._roster,
            [listener],
            on_ready=lambda *_: self._ready.set(),
            runs_dir=self.runs_dir,
            placement=Placement(self._policy),
        )
        self._serving = self._loop.create_task(work)
        try:
            self._loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _roster(self) -> dict[NodeName, ControlTransport]:
        return {NodeName(name): self._transport(name) for name in self.services}

    def _transport(self, name: str) -> ControlTransport:
        async def send(raw: bytes) -> bytes:
            if name in self._down:
                message = f"{name} is being restarted"
                raise NodeLostError(message, NodeName(name))
            return await asyncio.wrap_future(self.services[name].control(raw))

        return send

    def restart(self, name: str) -> None:
        """Stop a node and start it again on its folder."""
        with self.stopped(name):
            pass

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Stop a node for a block of code, and start it again on its folder."""
        self._down.add(name)
        self.services[name].stop()
        try:
            yield
        finally:
            self.services[name] = self._start(name)
            self._down.discard(name)
        self.await_agents()

    def drop_hot(self) -> None:
        """Evict every resident cache."""
        for service in self.services.values():
            call(service, Flush(drop_hot=True), Done)

    def await_agents(self) -> None:
        """Wait until the router sees every node ready."""
        for _ in range(600):
            nodes = self.http.get("/v1/nodes").json()["data"]
            serving = {node["incarnation"] for node in nodes if node["state"] == "ready"}
            if serving == self._incarnations():
                return
            threading.Event().wait(0.1)
        raise AssertionError(nodes)

    def _incarnations(self) -> set[int]:
        return {s.node.resources.identity.config.incarnation for s in self.services.values()}

    def chat(
        self, messages: list[Any], agent: str | None = None, *, stream: bool = False, **body: Any
    ) -> Answer:
        """Send a chat through the official SDK."""
        headers = {"X-Agent-ID": agent} if agent else {}
        request = {
            "model": self.model_name,
            "messages": messages,
            "temperature": 0,
            "max_tokens": 48,
            **body,
        }
        create = self.openai.chat.completions.with_raw_response.create
        if stream:
            return self._stream(create, request, headers)
        response = create(**request, extra_headers=headers)
        body = json.loads(response.text)
        choice = body["choices"][0]
        return self._answer(
            response.headers, choice["message"]["content"] or "", choice["finish_reason"], body
        )

    def _stream(self, create: Any, request: dict[str, Any], headers: dict[str, str]) -> Answer:
        response = create(
            **request, extra_headers=headers, stream=True, stream_options={"include_usage": True}
        )
        text, reason, usage = "", "", None
        for chunk in response.parse():
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
            usage = chunk.usage or usage
        assert usage is not None
        return self._answer(response.headers, text, reason, {"usage": usage.model_dump()})

    def _answer(self, headers: Any, text: str, reason: str, body: dict[str, Any]) -> Answer:
        cached = int(headers["x-macfabric-cached-tokens"])
        assert cached == body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Answer(
            text=text,
            agent=headers["x-macfabric-agent"],
            node=headers["x-macfabric-node"],
            cache=headers["x-macfabric-cache"],
            match=headers["x-macfabric-match"],
            cached_tokens=cached,
            prompt_tokens=body["usage"]["prompt_tokens"],
            epoch=int(headers["x-macfabric-epoch"]),
            finish_reason=reason,
            raw=body,
        )

    @property
    def model_name(self) -> str:
        """Name of the model the nodes serve."""
        return next(iter(self.services.values())).node.resources.identity.model.name

    def migrate(self, agent: str, to: str) -> dict[str, Any]:
        """Move an agent through the API."""
        response = self.http.post(f"/v1/agents/{agent}/migrate", json={"to": to})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def restart_router(self) -> None:
        """Stop the router and start another one, at another port, over the same nodes."""
        self._port = 0
        self._stop_router()
        self._start_router()

    def restart_all(self) -> None:
        """Stop the router and all nodes, and start them on their folders, at the same port."""
        self._stop_router()
        for name, service in self.services.items():
            service.stop()
            self.services[name] = self._start(name)
        self._start_router()
        self.await_agents()

    def _stop_router(self) -> None:
        self.http.close()
        self.openai.close()
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(20)

    def stop(self) -> None:
        """Stop router and nodes."""
        self._stop_router()
        for service in self.services.values():
            service.stop()


@contextmanager
def local_fabric(folder: Path, model: str, *names: str, **settings: Any) -> Iterator[LocalFabric]:
    """Run a fabric for a block of code: a real `up` if the environment selects one."""
    fabric_class: type[LocalFabric] = LocalFabric
    if os.environ.get(REAL_UP):
        from tests.support.real_fabric import RealFabric

        fabric_class = RealFabric
    fabric = fabric_class(folder, model, list(names), **settings)
    try:
        yield fabric
    finally:
        fabric.stop()
