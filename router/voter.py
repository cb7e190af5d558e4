"""`python -m router.voter`: a process that only grants terms to routers.

Two Macs cannot elect a router without each other; a third machine with this process can. It keeps
no agents, needs no Ray, and is reached by HTTPS with the fabric's own keys.
"""

import argparse
import asyncio
import json
import logging
import os
import ssl
import sys
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from fabric.codec import from_plain, parse_json, to_plain
from fabric.control.calls import (
    CONTROL_PATH,
    UNKNOWN_CALL,
    ErrorReply,
    decode_call,
    encode_reply,
)
from fabric.control.term_calls import GrantTerm, TermAnswer, TermView
from fabric.errors import FabricError, FatalError, RejectedError, UnauthorizedError
from fabric.hosting.clock import elapsed_s
from fabric.hosting.disk_flush import flush
from fabric.hosting.guarded_connection import admit
from fabric.hosting.http_server import HttpServer, read_body, server_config
from fabric.hosting.stored_ballot import StoredBallot
from fabric.keys import has_cluster_secret
from fabric.settings import TlsSettings
from fabric.turn.generation import CLUSTER_HEADER
from router.limits import TERM_CALL_BYTES_MAX
from router.listener import listen, urls_of
from router.private_files import write_private
from router.tls.contexts import RouterKeys, read_router_keys

FILE: Final = "voter.json"
BACKLOG: Final = 64

_LOG = logging.getLogger("macfabric.voter")


class TermFile:
    """The highest term that a voter granted, in a file that survives power loss."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> TermView | None:
        """Return the stored term, None without one; raise FatalError for a damaged file."""
        try:
            granted: TermView = from_plain(TermView, parse_json(self._path.read_bytes()), FILE)
        except FileNotFoundError:
            return None
        except (OSError, RejectedError) as error:
            message = (
                f"cannot read {self._path} ({error}): which router has this voter's promise is "
                "unknown; stop all routers but one and remove the file"
            )
            raise FatalError(message) from None
        return granted

    def write(self, granted: TermView) -> None:
        """Store a term; raise FabricError if the disk refuses."""
        try:
            write_private(self._path, json.dumps(to_plain(granted)))
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                flush(folder, "full")
            finally:
                os.close(folder)
        except OSError as error:
            message = f"the voter cannot store a term: {error.strerror}"
            raise FabricError(message, code="disk_refused") from None


class Voter:
    """Holder of a vote, and the route by which routers request it."""

    def __init__(self, keys: RouterKeys, file: TermFile) -> None:
        self._keys = keys
        self._file = file
        self._ballot = StoredBallot(self._store, elapsed_s)
        granted = file.read()
        if granted is not None:
            self._ballot.recall(granted)

    def app(self) -> Starlette:
        return Starlette(routes=[Route(CONTROL_PATH, self.control, methods=["POST"])])

    async def control(self, request: Request) -> Response:
        """Answer one control call; only routers of the fabric may make one."""
        try:
            if not has_cluster_secret(
                request.headers.get(CLUSTER_HEADER, ""), self._keys.cluster_key
            ):
                message = "only this fabric's routers may ask a voter"
                raise UnauthorizedError(message)
            admit(request.scope, "a router")
            reply: object = await self._answer(await read_body(request, TERM_CALL_BYTES_MAX))
        except FabricError as error:
            reply = ErrorReply(int(error.status), error.code, error.message)
        except ClientDisconnect:
            return Response(status_code=400)
        return Response(encode_reply(reply), media_type="application/msgpack")

    async def _answer(self, raw: bytes) -> TermAnswer:
        call, _ = decode_call(raw)
        if not isinstance(call, GrantTerm):
            message = "a voter only grants terms: send this request to a router"
            raise RejectedError(message, code=UNKNOWN_CALL)
        before = self._ballot.granted
        answer = await self._ballot.grant(call)
        if self._ballot.granted != before:
            _LOG.info("term %d is granted to %s", answer.term, answer.url or answer.router)
        return answer

    async def _store(self, granted: TermView) -> None:
        await asyncio.to_thread(self._file.write, granted)


async def serve_voter(voter: Voter, host: str, port: int, tls: ssl.SSLContext | None) -> None:
    """Serve a voter until the process ends."""
    listeners = listen(host, port)
    url = urls_of(listeners, "http" if tls is None else "https")[0]
    print(json.dumps({"url": url}), flush=True)  # noqa: T201 - its contract
    server = HttpServer(server_config(voter.app(), None, tls, log_config=None), BACKLOG)
    await server.serve(sockets=list(listeners))


def main() -> int:
    """Run a voter; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m router.voter", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="where its term is kept")
    parser.add_argument("--keys", type=Path, required=True, help="the fabric's keys")
    parser.add_argument("--host", required=True, help="address to listen at")
    parser.add_argument("--port", type=int, required=True, help="0 takes any free port")
    arguments = parser.parse_args()
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        keys = read_router_keys(arguments.keys.expanduser())
        folder = arguments.data_dir.expanduser()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        tls = keys.client_facing(TlsSettings())
        asyncio.run(
            serve_voter(Voter(keys, TermFile(folder / FILE)), arguments.host, arguments.port, tls)
        )
    except KeyboardInterrupt:
        return 0
    except FabricError as error:
        print(f"voter: {error}", file=sys.stderr)  # noqa: T201 - why it did not start
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
