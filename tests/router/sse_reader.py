"""Reads server-sent events as a dashboard does."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Told:
    name: str
    data: dict
    id: str | None


class Reader:
    def __init__(self, response):
        self.response = response
        self.comments = []
        self._lines = response.aiter_lines()

    async def next(self):
        """Return the next event, or None at the end of the stream."""
        fields = {}
        async for line in self._lines:
            if line.startswith(":"):
                self.comments.append(line)
            elif line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif fields:
                return Told(fields["event"], json.loads(fields["data"]), fields.get("id"))
        return None

    async def until(self, name, **wanted):
        """Read on to an event of that name and with such data; return all that was read."""
        read = []
        with suppress(TimeoutError):
            async with asyncio.timeout(60.0):
                while (told := await self.next()) is not None:
                    read.append(told)
                    if told.name == name and wanted.items() <= told.data.items():
                        return read
        complaint = f"no {name} {wanted} came: {read}"
        raise AssertionError(complaint)


@asynccontextmanager
async def following(http, after=None, **headers):
    headers |= {"last-event-id": after} if after else {}
    async with http.stream("GET", "/v1/events", headers=headers) as response:
        yield Reader(response)
