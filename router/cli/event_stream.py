"""Server-sent events of a fabric, as the command line follows them."""

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from router.cli.endpoint import Endpoint
from router.cli.errors import CommandError
from router.limits import FLEET_LINE_BYTES_MAX

SILENT_S = 30.0  # a quiet fabric says every few seconds that it lives
MEDIA_TYPE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class ToldEvent:
    """One event: its name, its id for who comes back, and what it says."""

    name: str
    id: str | None
    data: dict[str, Any]


class BrokenOffError(CommandError):
    """A stream ended in the middle."""


def follow_events(endpoint: Endpoint, path: str, after: str | None = None) -> Iterator[ToldEvent]:
    """Yield events until the fabric ends them, of a stream that knows them behind `after`."""
    headers = {"accept": MEDIA_TYPE} | ({"last-event-id": after} if after else {})
    with endpoint.asking("GET", path, SILENT_S) as connection:
        connection.request("GET", endpoint.path_of(path), headers=endpoint.headers(headers))
        response = connection.getresponse()
        if response.status != HTTPStatus.OK:
            endpoint.read(response.status, response.read())
        if response.headers.get_content_type() != MEDIA_TYPE:
            message = f"{endpoint.url} has no events to follow; is this a fabric of this version?"
            raise CommandError(message)
        try:
            yield from _events(response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            message = f"{endpoint.url} broke off ({error or type(error).__name__})"
            raise BrokenOffError(message) from None


def _events(response: http.client.HTTPResponse) -> Iterator[ToldEvent]:
    fields: dict[str, str] = {}
    while line := response.readline(FLEET_LINE_BYTES_MAX):
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:  # a comment has none
            fields[name] = value
        elif "data" in fields and line == b"\n":
            data = json.loads(fields["data"])
            yield ToldEvent(fields.get("event", "message"), fields.get("id"), data)
            fields = {}
