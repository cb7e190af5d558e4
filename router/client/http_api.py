"""HTTP requests to a fabric: keys, TLS, JSON, event streams, uploads, and their errors."""

import contextlib
import http.client
import json
import os
import select
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import urlsplit

from fabric.errors import HTTPS_REQUIRED
from fabric.keys import OPERATOR_HEADER
from fabric.limits import MIB
from router.limits import FLEET_LINE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Hints:
    """Remedies that error messages end with; a program names its own options in them."""

    unreachable: str = "Start one with `macfabric up`."
    untrusted: str = "Pass the ca.pem of the fabric's keys in `trusted`."
    unauthorized: str = "Pass a tenant's key as `key`."
    forbidden: str = "Pass an operator's key as `operator_key`, a tenant's as `key`."


class ClientError(Exception):
    """Request that got no usable answer."""


class InvalidUrlError(ClientError):
    """Text that is not the URL of a fabric."""


class UnreachableError(ClientError):
    """Server that did not answer in time, or not as a fabric does."""


class BrokenOffError(ClientError):
    """Stream that ended before its last event."""


class RefusedError(ClientError):
    """Error that the fabric answered; `param` names the invalid field."""

    def __init__(
        self, message: str, status: int, answer: object, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.answer: dict[str, Any] = answer if isinstance(answer, dict) else {}
        error = self.answer.get("error")
        fields = error if isinstance(error, dict) else {}
        self.code: str | None = fields.get("code")
        self.param: str | None = fields.get("param")
        self.retry_after_s = retry_after_s


TIMEOUT_S: Final = 120.0
SILENCE_S: Final = 30.0  # an idle stream sends a comment every few seconds
CHUNK_BYTES: Final = 1 * MIB
EVENT_STREAM: Final = "text/event-stream"
UNAVAILABLE: Final = "unavailable"  # health of a fabric without a serving node
_DONE: Final = "[DONE]"  # ends a stream of chat chunks


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event; `id` resumes the stream after it."""

    name: str
    id: str | None
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServerEvents:
    """Server-sent events of one response."""

    url: str
    response: http.client.HTTPResponse
    on_comment: Callable[[str], None] = lambda _: None

    @property
    def headers(self) -> http.client.HTTPMessage:
        return self.response.headers

    def __iter__(self) -> Iterator[ServerEvent]:
        try:
            yield from self._events()
        except (OSError, http.client.HTTPException, ValueError) as error:
            message = f"{self.url} broke off ({error or type(error).__name__})"
            raise BrokenOffError(message) from None

    def _events(self) -> Iterator[ServerEvent]:
        fields: dict[str, str] = {}
        while line := self.response.readline(FLEET_LINE_BYTES_MAX):
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:  # a comment has none
                fields[name] = value
            elif value:
                self.on_comment(value)
            elif "data" in fields and line == b"\n":
                if fields["data"] == _DONE:
                    return
                data = json.loads(fields["data"])
                yield ServerEvent(fields.get("event", "message"), fields.get("id"), data)
                fields = {}


@dataclass(frozen=True, slots=True)
class HttpApi:
    """A fabric's HTTP API at its URL, used with a tenant's key, an operator's key or neither."""

    url: str
    key: str | None = field(default=None, repr=False)
    operator_key: str | None = field(default=None, repr=False)
    timeout_s: float = TIMEOUT_S
    trusted: tuple[Path, ...] = ()  # certificates of authorities, beside those of the system
    checks_name: bool = True  # that the certificate is for the URL's host
    hints: Hints = field(default_factory=Hints)

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def call(
        self, method: str, path: str, body: object = None, timeout_s: float | None = None
    ) -> Any:
        """Return the JSON of a response."""
        with (
            self.open(method, path, body, timeout_s=timeout_s) as response,
            self._explain_errors(method, path, timeout_s),
        ):
            raw = response.read()
        return self._json(response, raw)

    def health(self) -> dict[str, Any]:
        """Return the fabric's health, also where no node serves."""
        try:
            health = self.get("/healthz")
        except RefusedError as error:
            if error.answer.get("status") == UNAVAILABLE:
                return error.answer
            raise
        return health if isinstance(health, dict) else {}

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield the response to a request, its body unread; raise RefusedError for an error."""
        sent = dict(headers or {})
        payload = None
        if body is not None:
            payload, sent["content-type"] = json.dumps(body), "application/json"
        with self._connect(timeout_s) as connection:
            with self._explain_errors(method, path, timeout_s):
                connection.request(method, self._path(path), payload, self._headers(sent))
                response = connection.getresponse()
                refusal = response.read() if response.status >= HTTPStatus.BAD_REQUEST else None
            if refusal is not None:
                raise self._refused_error(response, refusal)
            yield response

    @contextlib.contextmanager
    def stream(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = SILENCE_S,
        on_comment: Callable[[str], None] = lambda _: None,
    ) -> Iterator[ServerEvents]:
        """Yield the server-sent events of the response; pass comments to `on_comment`."""
        sent = {**(headers or {}), "accept": EVENT_STREAM}
        with self.open(method, path, body, sent, timeout_s) as response:
            if response.headers.get_content_type() != EVENT_STREAM:
                message = f"{self.url} sends no events: is it a fabric of this version?"
                raise ClientError(message)
            yield ServerEvents(self.url, response, on_comment)

    def events(self, path: str, after: str | None = None) -> Iterator[ServerEvent]:
        """Yield events until the fabric ends the stream; those after the id `after`, if given."""
        headers = {"last-event-id": after} if after else {}
        with self.stream("GET", path, headers=headers) as stream:
            yield from stream

    def upload(
        self,
        path: str,
        source: BinaryIO,
        headers: Mapping[str, str],
        on_sent: Callable[[int], None] = lambda _: None,
        timeout_s: float | None = None,
    ) -> Any:
        """Post a file and return the JSON answer; stop sending as soon as the fabric answers."""
        sent = {"content-length": str(os.fstat(source.fileno()).st_size), **headers}
        with (
            self._connect(timeout_s) as connection,
            self._explain_errors("POST", path, timeout_s),
        ):
            connection.putrequest("POST", self._path(path))
            for name, value in self._headers(sent).items():
                connection.putheader(name, value)
            connection.endheaders()
            # A broken pipe may follow an answer that refuses the file: that answer says why.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while not _has_answered(connection) and (chunk := source.read(CHUNK_BYTES)):
                    connection.send(chunk)
                    on_sent(len(chunk))
            response = connection.getresponse()
            raw = response.read()
        return self._json(response, raw)

    # --- connection --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connect(self, timeout_s: float | None) -> Iterator[http.client.HTTPConnection]:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        parts = urlsplit(self.url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme not in ("http", "https") or not host:
            message = f"{self.url!r} is not a fabric's URL, such as http://127.0.0.1:8000"
            raise InvalidUrlError(message)
        connection = (
            http.client.HTTPConnection(host, port, timeout=timeout_s)
            if parts.scheme == "http"
            else http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._context())
        )
        with contextlib.closing(connection):
            yield connection

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a file may hold no authority
        context.check_hostname = self.checks_name
        for path in self.trusted:
            try:
                context.load_verify_locations(path)
            except (OSError, ssl.SSLError) as error:
                message = f"{path} is not a certificate ({error.strerror or error})"
                raise ClientError(message) from None
        return context

    def _path(self, path: str) -> str:
        return urlsplit(self.url).path.rstrip("/") + path

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        key = {"authorization": f"Bearer {self.key}"} if self.key else {}
        operator = {OPERATOR_HEADER: self.operator_key} if self.operator_key else {}
        return {"accept": "application/json", **key, **operator, **headers}

    # --- answers and errors ------------------------------------------------------------------

    @contextlib.contextmanager
    def _explain_errors(self, method: str, path: str, timeout_s: float | None) -> Iterator[None]:
        """Turn what breaks a connection into UnreachableError."""
        try:
            yield
        except TimeoutError:
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            message = f"{self.url} did not answer {method} {path} within {limit_s:g} s."
            raise UnreachableError(message) from None
        except ssl.SSLCertVerificationError as error:
            message = (
                f"{self.url} shows a certificate that is not trusted here "
                f"({error.verify_message}). {self.hints.untrusted}"
            )
            raise UnreachableError(message) from None
        except ssl.SSLError as error:
            reason = (error.reason or "?").replace("_", " ").lower()
            message = f"{self.url} does not answer as https does ({reason}). Does it speak http?"
            raise UnreachableError(message) from None
        except (OSError, http.client.HTTPException) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            message = f"No fabric answers at {self.url} ({why}). {self.hints.unreachable}"
            raise UnreachableError(message) from None

    def _json(self, response: http.client.HTTPResponse, raw: bytes) -> Any:
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise self._refused_error(response, raw)
        try:
            return json.loads(raw) if raw else {}
        except ValueError:
            message = f"{self.url} answered {response.status}: no JSON; is this a fabric?"
            raise ClientError(message) from None

    def _refused_error(self, response: http.client.HTTPResponse, raw: bytes) -> RefusedError:
        """Return the error that an answer of status 400 or more describes."""
        status = response.status
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = None
        error = answer.get("error") if isinstance(answer, dict) else None
        fields = error if isinstance(error, dict) else {}
        why = fields.get("message")
        if fields.get("code") == HTTPS_REQUIRED:
            message = f"The router at {self.url} speaks https: begin its address with https://."
        elif status == HTTPStatus.UNAUTHORIZED:
            reason = why or "unauthorized"
            message = f"{self.url} refuses the key: {reason}. {self.hints.unauthorized}"
        elif status == HTTPStatus.FORBIDDEN:
            message = f"{self.url} refuses: {why or 'forbidden'}. {self.hints.forbidden}"
        else:
            message = f"{self.url} answered {status}: {why or 'no JSON; is this a fabric?'}"
        after = response.headers.get("retry-after") or ""
        return RefusedError(message, status, answer, float(after) if after.isdecimal() else None)


def _has_answered(connection: http.client.HTTPConnection) -> bool:
    # Encryption may make its socket readable for reasons of its own.
    if connection.sock is None or isinstance(connection.sock, ssl.SSLSocket):
        return False
    return bool(select.select([connection.sock], [], [], 0)[0])
