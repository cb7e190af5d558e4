"""A router in its own process that may be killed or frozen; control calls go over a relay."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp

from fabric.ids import DEFAULT_TENANT
from fabric.settings import RouterSettings
from router.fleet.expected_nodes import ExpectedNodes
from router.fleet.node_client import NodeLostError
from router.listener import inherited, listen
from router.restart import LISTENER_OPTION, RestartRequest, become_restarted
from router.serve import serve_roster
from tests.support.services import KEY

ROOT = Path(__file__).resolve().parents[2]
CALL_S = 60.0
API_KEY = "key-of-a-client-elsewhere"
OPERATOR_KEY = "key-of-an-operator-elsewhere"


class ControlRelay:
    """Relay of control calls from router processes to nodes of this process, in Ray's place."""

    def __init__(self, nodes, host="127.0.0.1"):
        relay = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                raw = self.rfile.read(int(self.headers["content-length"]))
                reply = relay.nodes[self.path.strip("/")].control(raw).result(CALL_S)
                self.send_response(200)
                self.send_header("content-length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_):
                pass

        self.nodes = nodes
        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class RouterProcess:
    """One of a fabric's routers."""

    def __init__(self, relay, log, host="127.0.0.1", prefix=(), *, standby=True):
        """Start the router, listening at `host`, by a command that begins with `prefix`."""
        argv = [host, relay.url, "standby" if standby else "sole", *relay.nodes]
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.support.router_process", *argv],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self.url = json.loads(self._process.stdout.readline())["url"]

    def send(self, number):
        """Send a signal."""
        os.kill(self._process.pid, number)

    def stop(self):
        """Kill the router, frozen or not."""
        if self._process.poll() is None:
            self.send(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


async def _serve(listeners, relay, role, names, restart):
    async with aiohttp.ClientSession() as session:

        def transport(name):
            async def call(raw):
                try:
                    async with session.post(f"{relay}/{name}", data=raw) as response:
                        return await response.read()
                except aiohttp.ClientError as error:
                    raise NodeLostError(repr(error), name) from None

            return call

        nodes = {name: transport(name) for name in names}

        async def roster():
            return nodes

        settings = RouterSettings(
            standby=role == "standby",
            nodes_expected=len(names),
            takeover_after_s=20.0,
            api_keys={DEFAULT_TENANT: API_KEY},
            operator_keys={"ops": OPERATOR_KEY},
        )
        expected = ExpectedNodes(len(names))
        await serve_roster(settings, KEY, roster, listeners, expected=expected, restart=restart)


def _main(host, relay, role, *more):
    option = f"{LISTENER_OPTION}="
    names = [each for each in more if not each.startswith(option)]
    descriptors = [int(each.removeprefix(option)) for each in more if each.startswith(option)]
    listeners = inherited(descriptors) or listen(host, 0)
    kept, restart = [listener.dup() for listener in listeners], RestartRequest()
    asyncio.run(_serve(listeners, relay, role, names, restart))
    if restart.is_requested:
        become_restarted(kept)


if __name__ == "__main__":
    _main(*sys.argv[1:])
