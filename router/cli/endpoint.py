"""The fabric's HTTP API as the command line uses it."""

import contextlib
import http.client
import json
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from fabric.errors import HTTPS_REQUIRED
from fabric.keys.api_keys import OPERATOR_HEADER
from fabric.keys.key_files import AUTHORITY_CERTIFICATE, MADE_KEYS, SHIPPED_KEYS
from fabric.settings import is_loopback
from router.cli.data_folder import DataFolder, default_data_dir, read_json
from router.cli.errors import MISUSED, CommandError, FabricRefusedError
from router.supervise.processes import is_alive

URL_VARIABLE = "MACFABRIC_URL"
KEY_VARIABLE = "MACFABRIC_API_KEY"
CA_VARIABLE = "MACFABRIC_CA"
OPERATOR_KEY_VARIABLE = "MACFABRIC_OPERATOR_KEY"
TIMEOUT_S = 30.0
DOWN = "unavailable"  # what /healthz calls a fabric of which no node serves
_WITHHELD = (
    "The data folder's operator key is not sent where others could read it: set router.tls.mode to "
    f"auto, or put the key into {OPERATOR_KEY_VARIABLE} to send it all the same."
)
_HOW_TO_START = "Start one with `macfabric up`, or name it with --url or MACFABRIC_URL."


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a fabric, and the keys to it: a tenant's (or any), and an operator's."""

    url: str
    key: str | None = field(default=None, repr=False)
    operator_key: str | None = field(default=None, repr=False)
    trusted: tuple[Path, ...] = ()  # certificates of authorities, beside those of the system
    checks_name: bool = True  # that the certificate is for the URL's host
    withholds_key: bool = False  # the data folder's operator key, which others could read

    @property
    def warning(self) -> str | None:
        """What is wrong with sending the keys to this URL."""
        if not ((self.key or self.operator_key) and travels_readably(self.url)):
            return None
        return (
            f"warning: {self.url} speaks no https: whoever listens on the network can read the key "
            "that is sent there (see docs/security.md)"
        )

    def get(self, path: str, timeout_s: float = TIMEOUT_S) -> Any:
        return self.call("GET", path, timeout_s=timeout_s)

    def call(
        self, method: str, path: str, body: object = None, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """Make one request and return its JSON; raise CommandError in words."""
        return self.read(*self._exchange(method, path, body, timeout_s))

    def _exchange(
        self, method: str, path: str, body: object, timeout_s: float
    ) -> tuple[int, bytes]:
        payload, more = None, {}
        if body is not None:
            payload, more = json.dumps(body), {"content-type": "application/json"}
        with self.asking(method, path, timeout_s) as connection:
            connection.request(method, self.path_of(path), payload, self.headers(more))
            response = connection.getresponse()
            return response.status, response.read()

    def health(self) -> dict[str, Any]:
        """Return what the fabric says of its health, also where no node serves."""
        status, raw = self._exchange("GET", "/healthz", None, TIMEOUT_S)
        with contextlib.suppress(ValueError):
            value = json.loads(raw)
            if (
                status == HTTPStatus.SERVICE_UNAVAILABLE
                and isinstance(value, dict)
                and value.get("status") == DOWN
            ):
                return dict(value)
        value = self.read(status, raw)
        return value if isinstance(value, dict) else {}

    def path_of(self, path: str) -> str:
        """Return a resource's path on the server that the URL names."""
        return urlsplit(self.url).path.rstrip("/") + path

    def headers(self, more: Mapping[str, str]) -> dict[str, str]:
        key = {"authorization": f"Bearer {self.key}"} if self.key else {}
        operator = {OPERATOR_HEADER: self.operator_key} if self.operator_key else {}
        return {"accept": "application/json", **key, **operator, **more}

    @contextlib.contextmanager
    def asking(
        self, method: str, path: str, timeout_s: float
    ) -> Iterator[http.client.HTTPConnection]:
        """Give a connection for one request; turn what breaks it into a CommandError."""
        connection = self._connect(timeout_s)
        try:
            yield connection
        except TimeoutError:
            message = f"{self.url} did not answer {method} {path} within {timeout_s:g} s."
            raise CommandError(message) from None
        except ssl.SSLCertVerificationError as error:
            message = (
                f"{self.url} shows a certificate that is not trusted here "
                f"({error.verify_message}). Copy the ca.pem of the fabric's keys to this machine, "
                f"and put its path into {CA_VARIABLE}."
            )
            raise CommandError(message) from None
        except ssl.SSLError as error:
            reason = (error.reason or "?").replace("_", " ").lower()
            message = f"{self.url} does not answer as https does ({reason}). Does it speak http?"
            raise CommandError(message) from None
        except (OSError, http.client.HTTPException) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            message = f"No fabric answers at {self.url} ({why}). {_HOW_TO_START}"
            raise CommandError(message) from None
        finally:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme not in ("http", "https") or not host:
            message = f"{self.url!r} is no URL of a fabric; it looks like http://127.0.0.1:8000"
            raise CommandError(message, MISUSED)
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._context())

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a file may hold no authority
        context.check_hostname = self.checks_name
        for path in self.trusted:
            try:
                context.load_verify_locations(path)
            except (OSError, ssl.SSLError) as error:
                message = f"{path} is no certificate ({error.strerror or error})"
                raise CommandError(message) from None
        return context

    def read(self, status: int, raw: bytes) -> Any:
        """Return an answer's JSON; raise CommandError with what it says went wrong."""
        try:
            value = json.loads(raw) if raw else {}
        except ValueError:
            value = None
        if status < HTTPStatus.BAD_REQUEST and value is not None:
            return value
        error = value.get("error") if isinstance(value, dict) else None
        why = error.get("message") if isinstance(error, dict) else None
        if isinstance(error, dict) and error.get("code") == HTTPS_REQUIRED:
            message = f"The router at {self.url} speaks https: begin its address with https://."
            raise CommandError(message)
        if status == HTTPStatus.UNAUTHORIZED:
            hint = f" Put the key into {KEY_VARIABLE}."
            message = f"{self.url} refuses the key: {why or 'unauthorized'}.{hint}"
        elif status == HTTPStatus.FORBIDDEN:
            hint = f"Put an operator's key into {OPERATOR_KEY_VARIABLE}, a tenant's into"
            hint = _WITHHELD if self.withholds_key else f"{hint} {KEY_VARIABLE}."
            message = f"{self.url} refuses: {why or 'forbidden'}. {hint}"
        else:
            message = f"{self.url} answered {status}: {why or 'no JSON; is this a fabric?'}"
        code = error.get("code") if isinstance(error, dict) else None
        raise FabricRefusedError(message, code if isinstance(code, str) else None)


def agent_path(agent: str, verb: str = "") -> str:
    """Return the path of an agent, or of something to do with it."""
    return f"/v1/agents/{quote(agent, safe='')}" + (f"/{verb}" if verb else "")


def travels_readably(url: str) -> bool:
    """Say whether others could read what is sent to a URL."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


def find_endpoint(url: str | None, data_dir: Path | None, key: str | None = None) -> Endpoint:
    """Return the fabric that the options, the environment or the data folder name.

    Whoever may read the data folder operates the fabric that runs in it.
    """
    key = key or os.environ.get(KEY_VARIABLE)
    operator_key = os.environ.get(OPERATOR_KEY_VARIABLE)
    chosen = url or (None if data_dir else os.environ.get(URL_VARIABLE))
    folder = DataFolder((data_dir or default_data_dir()).expanduser())
    authorities = _authorities(folder)
    record = read_json(folder.endpoint)
    found, shown = record.get("url"), record.get("certificate")
    if chosen and chosen.rstrip("/") != found:
        return Endpoint(chosen.rstrip("/"), key, operator_key, authorities)
    if not isinstance(found, str):
        starter, _ = folder.read_run()
        if starter is not None and is_alive(starter):
            message = f"The fabric in {folder.path} is starting (process {starter.pid}); try again."
        else:
            message = f"No fabric is running in {folder.path}. {_HOW_TO_START}"
        raise CommandError(message)
    withheld = operator_key is None and travels_readably(found)
    operator_key = operator_key or (None if withheld else folder.read_operator_key())
    if withheld:
        return Endpoint(found, key, None, authorities, withholds_key=True)
    if isinstance(shown, str):  # the operator's own, which may not be for 127.0.0.1
        return Endpoint(found, key, operator_key, (Path(shown),), checks_name=False)
    return Endpoint(found, key, operator_key, authorities)


def _authorities(folder: DataFolder) -> tuple[Path, ...]:
    """List whom this machine's owner trusts to name a fabric, as far as they are there."""
    if named := os.environ.get(CA_VARIABLE):
        return (Path(named).expanduser(),)
    made = (folder.keys.authority, Path(MADE_KEYS).expanduser() / AUTHORITY_CERTIFICATE)
    shipped = Path(SHIPPED_KEYS).expanduser() / AUTHORITY_CERTIFICATE
    return tuple(path for path in (*made, shipped) if path.exists())
