"""The fabric's HTTP API as the command line uses it."""

import contextlib
import http.client
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from router.cli.errors import MISUSED, CommandError
from router.cli.folder import DataFolder, default_data_dir, read_json

URL_VARIABLE = "MACFABRIC_URL"
KEY_VARIABLE = "MACFABRIC_API_KEY"
TIMEOUT_S = 30.0
_HOW_TO_START = "Start one with `macfabric up`, or name it with --url or MACFABRIC_URL."


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a fabric answers, and the key to it."""

    url: str
    key: str | None = None

    def get(self, path: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Read a resource."""
        return self.call("GET", path, timeout_s=timeout_s)

    def call(
        self, method: str, path: str, body: object = None, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """Make one request and return its JSON; raise CommandError in words."""
        payload, more = None, {}
        if body is not None:
            payload, more = json.dumps(body), {"content-type": "application/json"}
        with self.asking(method, path, timeout_s) as connection:
            connection.request(method, self.path_of(path), payload, self.headers(more))
            response = connection.getresponse()
            raw = response.read()
        return self.read(response.status, raw)

    def path_of(self, path: str) -> str:
        """Return a resource's path on the server that the URL names."""
        return urlsplit(self.url).path.rstrip("/") + path

    def headers(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return the headers that every request has, and `more`."""
        key = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return {"accept": "application/json", **key, **more}

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
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        return kind(host, port, timeout=timeout_s)

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
        if status == HTTPStatus.UNAUTHORIZED:
            hint = f" Put the key into {KEY_VARIABLE}."
            message = f"{self.url} refuses the key: {why or 'unauthorized'}.{hint}"
        else:
            message = f"{self.url} answered {status}: {why or 'no JSON; is this a fabric?'}"
        raise CommandError(message)


def agent_path(agent: str, verb: str = "") -> str:
    """Return the path of an agent, or of something to do with it."""
    return f"/v1/agents/{quote(agent, safe='')}" + (f"/{verb}" if verb else "")


def find_endpoint(url: str | None, data_dir: Path | None) -> Endpoint:
    """Return the fabric that the options, the environment or the data folder name."""
    key = os.environ.get(KEY_VARIABLE)
    chosen = url or (None if data_dir else os.environ.get(URL_VARIABLE))
    if chosen:
        return Endpoint(chosen.rstrip("/"), key)
    folder = DataFolder(data_dir or default_data_dir())
    found = read_json(folder.endpoint).get("url")
    if not isinstance(found, str):
        message = f"No fabric is running in {folder.path}. {_HOW_TO_START}"
        raise CommandError(message)
    return Endpoint(found, key)
