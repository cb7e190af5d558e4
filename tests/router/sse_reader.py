"""Reads server-sent events as a dashboard does."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerEvent:
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
        values = {}
        async for line in self._lines:
            if line.startswith(":"):
                self.comments.append(line)
            elif line:
                name, _, value = line.partition(": ")
                values[name] = value
            elif values:
                return ServerEvent(values["event"], json.loads(values["data"]), values.get("id"))
        return None

    async def __aiter__(self):
        while (event := await self.next()) is not None:
            yield event

    async def until(self, name, **fields):
        """Read up to an event with this name and these fields; return all events read."""
        events = []
        with suppress(TimeoutError):
            async with asyncio.timeout(60.0):
                while (event := await self.next()) is not None:
                    events.append(event)
                    if event.name == name and fields.items() <= event.data.items():
                        return events
        complaint = f"no {name} {fields} came: {events}"
        raise AssertionError(complaint)


@asynccontextmanager
async def following(http, after=None, path="/v1/events", **headers):
    headers |= {"last-event-id": after} if after else {}
    async with http.stream("GET", path, headers=headers) as response:
        yield Reader(response)
