"""A node without a model that loads for a while, describes itself, and records its calls.

The model's name is its script: "loads:2.5" loads for that many seconds, "broken:why" fails to
start, "needs:PATH" fails while there is no such file, and "dies:" ends its actor permanently.
"""

import os
import ssl
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import ray

from fabric.control.calls import decode_call, encode_reply
from fabric.control.node_calls import Describe, Done, Flush, NodeView, SelfTest, Stop, TierBytes
from fabric.errors import FatalError
from fabric.ids import NodeName
from fabric.net.links import PeerList
from fabric.settings import NodeSettings


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Counterpart of the class in node.service."""

    name: NodeName
    data_dir: Path
    model: str
    cluster_key: bytes
    settings: NodeSettings
    host: str
    incarnation: int
    tls: ssl.SSLContext | None = None
    machine_nodes: int = 1


class NodeService:
    """Counterpart of the class in node.service."""

    def __init__(
        self, config: NodeConfig, end_process: object = None, previous_log: object = None
    ) -> None:
        self.config = config

    def start(self) -> None:
        script, _, argument = self.config.model.partition(":")
        if script == "broken":
            raise FatalError(argument)
        if script == "needs" and not Path(argument).exists():
            message = f"{argument} is not there"
            raise FatalError(message)
        if script == "dies":
            self._note("death")
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
            time.sleep(60)
        end_s = time.process_time() + (0.0 if script == "needs" else float(argument))
        while time.process_time() < end_s:  # keeps a core busy, as a model's imports do
            pass
        self._note("start")

    def control(self, raw: bytes) -> Future[bytes]:
        reply: Future[bytes] = Future()
        reply.set_result(self._answer(raw))
        return reply

    def _answer(self, raw: bytes) -> bytes:
        call, _ = decode_call(raw)
        if isinstance(call, Describe):
            return encode_reply(self._view())
        if isinstance(call, PeerList):
            return encode_reply(Done())
        assert isinstance(call, (Flush, Stop))
        self._note(type(call).__name__.lower())
        return encode_reply(Done())

    def stop(self) -> None:
        self._note("stopped")

    def _note(self, what: str) -> None:
        with (self.config.data_dir / "notes").open("a") as file:
            file.write(f"{what} {self.config.incarnation} {os.getpid()}\n")

    def _view(self) -> NodeView:
        config = self.config
        return NodeView(
            name=config.name,
            host=config.host,
            pid=os.getpid(),
            incarnation=config.incarnation,
            http_url=f"http://{config.host}:1",
            model=config.model,
            fingerprint="00",
            context_tokens_max=8192,
            state="ready",
            agents=0,
            tokens=0,
            bytes=TierBytes(hot=0, disk=0),
            addresses=(),
            waiting=0,
            active=0,
            queue_s=0.0,
            prefill_tokens_per_s=1.0,
            decode_tokens_per_s=1.0,
            bytes_per_token=1,
            self_test=SelfTest(passed=True, detail="stand-in", seconds=0.0),
        )
