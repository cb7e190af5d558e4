"""Download and upload of hibernation files, in chunks."""

import contextlib
import http.client
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO

from fabric.control.hibernation_calls import MEDIA_TYPE
from fabric.errors import RejectedError
from fabric.record.hibernation_file import (
    LEAD_BYTES_MAX,
    FrameReader,
    HibernationHeader,
    peek_header,
)
from router.cli.errors import MISUSED, CommandError
from router.cli.terminal import errors_are_terminal, start_bar
from router.client.client import Fabric
from router.client.http_api import CHUNK_BYTES
from router.limits import HIBERNATION_STALL_S

# A node waits for a running turn before it answers, and syncs its disk after the last byte.
ANSWER_TIMEOUT_S = HIBERNATION_STALL_S + 60.0

Advance = Callable[[int], None]


@contextlib.contextmanager
def progress(label: str, total_bytes: int, *, quiet: bool) -> Iterator[Advance]:
    """Show a bar on a terminal; yield a function that advances it by a number of bytes."""
    if quiet or not errors_are_terminal():
        yield lambda _: None
        return
    bar = start_bar(label, total_bytes, counts_bytes=True)
    try:
        yield bar.advance
    finally:
        bar.stop()


def download(
    fabric: Fabric,
    path: str,
    headers: Mapping[str, str],
    target: Path,
    *,
    key_of: Callable[[HibernationHeader], bytes | None],
    quiet: bool,
) -> tuple[HibernationHeader, Mapping[str, str]]:
    """Store a fabric's answer as `target`, whole, checked and durable, or not at all."""
    with fabric.open("POST", path, headers=headers, timeout_s=ANSWER_TIMEOUT_S) as response:
        if response.status != HTTPStatus.OK:
            message = f"{fabric.url} answered {response.status}; is this a fabric?"
            raise CommandError(message)
        total_bytes = int(response.headers.get("content-length") or 0)
        with (
            _new_file(target) as file,
            progress(target.name, total_bytes, quiet=quiet) as advance,
        ):
            header = _store(response, file, key_of, advance)
        return header, dict(response.headers)


def upload(
    fabric: Fabric, path: str, headers: Mapping[str, str], source: BinaryIO, *, quiet: bool
) -> Any:
    """Send a file and return the fabric's JSON."""
    total_bytes = os.fstat(source.fileno()).st_size
    with progress(Path(source.name).name, total_bytes, quiet=quiet) as advance:
        sent = {"content-type": MEDIA_TYPE, **headers}
        return fabric.upload(path, source, sent, advance, ANSWER_TIMEOUT_S)


def read_header(source: BinaryIO) -> HibernationHeader:
    """Read a file's header, and go back to its start."""
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
        message = f"the file arrived damaged ({error.message}); the agent is unchanged, try again"
        raise CommandError(message) from None
    assert header is not None, "a whole file has a header"
    return header


def _received(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        message = f"the connection broke ({error}); the agent is unchanged, try again"
        raise CommandError(message) from None


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[BinaryIO]:
    """Yield a private temporary file that is renamed to `target` once it is durable."""
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
