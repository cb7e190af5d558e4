"""An agent's file between a disk here and a fabric, never held as a whole."""

import contextlib
import http.client
import os
import secrets
import select
import ssl
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO

from fabric.control.hibernation_calls import MEDIA_TYPE
from fabric.errors import RejectedError
from fabric.limits import MIB
from fabric.record.hibernation_file import (
    LEAD_BYTES_MAX,
    FrameReader,
    HibernationHeader,
    peek_header,
)
from router.cli.endpoint import Endpoint
from router.cli.errors import MISUSED, CommandError
from router.cli.terminal import errors_are_terminal, start_bar
from router.limits import HIBERNATION_STALL_S

CHUNK_BYTES = 1 * MIB
# A node waits for a running turn before it answers, and syncs its disk behind the last byte.
ANSWER_TIMEOUT_S = HIBERNATION_STALL_S + 60.0

Advance = Callable[[int], None]


@contextlib.contextmanager
def progress(label: str, total_bytes: int, *, quiet: bool) -> Iterator[Advance]:
    """Show a bar on a terminal; give a function that takes the bytes of each step."""
    if quiet or not errors_are_terminal():
        yield lambda _: None
        return
    bar = start_bar(label, total_bytes, counts_bytes=True)
    try:
        yield bar.advance
    finally:
        bar.stop()


def download(
    endpoint: Endpoint,
    path: str,
    headers: Mapping[str, str],
    target: Path,
    *,
    key_of: Callable[[HibernationHeader], bytes | None],
    quiet: bool,
) -> tuple[HibernationHeader, Mapping[str, str]]:
    """Store a fabric's answer as `target`, whole, checked and durable, or not at all."""
    with endpoint.asking("POST", path, ANSWER_TIMEOUT_S) as connection:
        connection.request("POST", endpoint.path_of(path), b"", endpoint.headers(headers))
        response = connection.getresponse()
        if response.status != HTTPStatus.OK:
            endpoint.read(response.status, response.read())
            message = f"{endpoint.url} answered {response.status}; is this a fabric?"
            raise CommandError(message)
        total_bytes = int(response.headers.get("content-length") or 0)
        with (
            _new_file(target) as file,
            progress(target.name, total_bytes, quiet=quiet) as advance,
        ):
            header = _store(response, file, key_of, advance)
    return header, dict(response.headers)


def upload(
    endpoint: Endpoint, path: str, headers: Mapping[str, str], source: BinaryIO, *, quiet: bool
) -> Any:
    """Send a file and return the fabric's JSON; stop sending as soon as it answers."""
    total_bytes = os.fstat(source.fileno()).st_size
    sent = {"content-type": MEDIA_TYPE, "content-length": str(total_bytes), **headers}
    with (
        endpoint.asking("POST", path, ANSWER_TIMEOUT_S) as connection,
        progress(Path(source.name).name, total_bytes, quiet=quiet) as advance,
    ):
        connection.putrequest("POST", endpoint.path_of(path))
        for name, value in endpoint.headers(sent).items():
            connection.putheader(name, value)
        connection.endheaders()
        # A broken pipe may follow an answer that refuses the file: that answer says why.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while not _has_answered(connection) and (chunk := source.read(CHUNK_BYTES)):
                connection.send(chunk)
                advance(len(chunk))
        response = connection.getresponse()
        raw = response.read()
    return endpoint.read(response.status, raw)


def read_header(source: BinaryIO) -> HibernationHeader:
    """Read what a file says of itself, and go back to its start."""
    try:
        header = peek_header(source.read(LEAD_BYTES_MAX))
    except RejectedError as error:
        message = f"{source.name}: {error.message}"
        raise CommandError(message) from None
    if header is None:
        message = f"{source.name}: the file was cut short"
        raise CommandError(message)
    source.seek(0)
    return header


def _store(
    response: http.client.HTTPResponse,
    file: BinaryIO,
    key_of: Callable[[HibernationHeader], bytes | None],
    advance: Advance,
) -> HibernationHeader:
    header: HibernationHeader | None = None
    reader: FrameReader | None = None
    lead = b""
    try:
        while chunk := _received(response):
            file.write(chunk)
            advance(len(chunk))
            if reader is None:
                lead += chunk
                header = peek_header(lead)
                if header is None:
                    continue
                reader, chunk = FrameReader(key_of(header)), lead
            for _ in reader.feed(chunk):
                pass
        (reader or FrameReader(None)).finish()
    except RejectedError as error:
        message = f"what came is no sound file ({error.message}); the agent is as it was, ask again"
        raise CommandError(message) from None
    assert header is not None, "a whole file has a header"
    return header


def _received(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        message = f"the fabric broke off ({error}); the agent is as it was, ask again"
        raise CommandError(message) from None


def _has_answered(connection: http.client.HTTPConnection) -> bool:
    # Encryption may make its socket readable for reasons of its own.
    if connection.sock is None or isinstance(connection.sock, ssl.SSLSocket):
        return False
    return bool(select.select([connection.sock], [], [], 0)[0])


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[BinaryIO]:
    """Write beside `target`, for its owner only, and give it its name once it is durable."""
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        message = f"{target}: {error.strerror}"
        raise CommandError(message, MISUSED) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        partial.replace(target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        message = f"{target}: {error.strerror or error}"
        raise CommandError(message) from None
    finally:
        partial.unlink(missing_ok=True)
