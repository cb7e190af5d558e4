"""A node in its own process that may be killed; control calls go over a pipe."""

import itertools
import multiprocessing
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from node.mlx.engine import Engine
from node.runtime.identity import NodeConfig
from node.service import NodeService
from router.fleet.node_client import NodeLostError

READY, STOP = b"ready", b"stop"
NUMBER_BYTES = 8
STOP_S = 60.0
# Where forking is safe, one process imports MLX for all nodes: two seconds of each start.
FORKS = sys.platform.startswith("linux")
_CONTEXT = multiprocessing.get_context("forkserver" if FORKS else "spawn")


class NodeProcess:
    """A running node; any thread may call `control`, also after the node's death."""

    def __init__(self, config: NodeConfig, step_s: float = 0.0) -> None:
        """Start the node and wait until it serves; each engine step lasts `step_s` longer."""
        if FORKS:
            _CONTEXT.set_forkserver_preload([__name__])
        self.incarnation = config.incarnation
        self._name = config.name
        self._pipe, child_end = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=_serve, args=(child_end, config, step_s), daemon=True
        )
        self._process.start()
        child_end.close()
        assert self._pipe.recv_bytes() == READY
        self._numbers = itertools.count()
        self._pending: dict[int, Future[bytes]] = {}
        self._sending = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def control(self, raw: bytes) -> Future[bytes]:
        """Make one control call; it raises NodeLostError if the process ends before it answers."""
        answer: Future[bytes] = Future()
        with self._sending:
            number = next(self._numbers)
            self._pending[number] = answer
            try:
                self._pipe.send_bytes(number.to_bytes(NUMBER_BYTES) + raw)
            except OSError:
                self._fail_pending()
        return answer

    def kill(self) -> None:
        """Kill the node with SIGKILL."""
        self._process.kill()
        self._process.join(STOP_S)
        self._reader.join(STOP_S)
        assert not self._process.is_alive()

    def stop(self) -> None:
        """Shut the node down."""
        with self._sending, suppress(OSError):
            self._pipe.send_bytes(STOP)
        self._process.join(STOP_S)
        self.kill()

    def _read(self) -> None:
        try:
            while True:
                raw = self._pipe.recv_bytes()
                future = self._pending.pop(int.from_bytes(raw[:NUMBER_BYTES]))
                if future.set_running_or_notify_cancel():
                    future.set_result(raw[NUMBER_BYTES:])
        except (EOFError, OSError):
            with self._sending:
                self._fail_pending()

    def _fail_pending(self) -> None:
        while self._pending:
            _, future = self._pending.popitem()
            if future.set_running_or_notify_cancel():
                future.set_exception(NodeLostError("its process is dead", self._name))


def _serve(pipe: Connection, config: NodeConfig, step_s: float) -> None:
    if step_s:
        _decode_slowly(step_s)
    service = NodeService(config)
    service.start()
    pipe.send_bytes(READY)
    sending = threading.Lock()

    def answer(number: bytes, reply: Future[bytes]) -> None:
        with sending:
            pipe.send_bytes(number + reply.result())

    with suppress(EOFError):  # the parent process has ended
        while (raw := pipe.recv_bytes()) != STOP:
            number, call = raw[:NUMBER_BYTES], raw[NUMBER_BYTES:]
            service.control(call).add_done_callback(partial(answer, number))
    service.stop()


def _decode_slowly(step_s: float) -> None:
    """Delay every decode step, so that answers last long enough to disturb their agents."""
    launch = Engine.launch

    def slow(self: Engine, slots: list) -> None:
        time.sleep(step_s)
        launch(self, slots)

    Engine.launch = slow
