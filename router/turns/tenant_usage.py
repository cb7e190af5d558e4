"""Usage of each tenant's turns by hour and day (UTC): tokens computed, reused and answered.

Counters, not records of turns: nothing of a prompt or an agent is in them. They are stored now and
then, so that a restart loses little.
"""

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Final

from fabric.codec import from_plain, parse_json
from fabric.errors import RejectedError
from fabric.ids import TenantId, parse_tenant_id
from fabric.ports import Clock
from fabric.turn.generation import Admitted, TurnTimes
from router.limits import USAGE_BYTES_MAX, USAGE_DAYS, USAGE_HOURS, USAGE_ROWS_MAX, USAGE_SAVE_S
from router.private_files import write_private

_LOG = logging.getLogger("macfabric.router.usage")
FORMAT: Final = 1


class Period(StrEnum):
    """Period over which usage is summed."""

    HOUR = "hour"
    DAY = "day"

    @property
    def length_s(self) -> int:
        """Seconds of a period."""
        return 3_600 if self is Period.HOUR else 86_400

    @property
    def kept_s(self) -> int:
        """Seconds for which periods are kept."""
        return self.length_s * (USAGE_HOURS if self is Period.HOUR else USAGE_DAYS)


@dataclass(slots=True)
class Counts:
    """Counters of one tenant in one period."""

    turns: int = 0  # completed turns
    broken_turns: int = 0  # failed turns, and those whose client left
    refused_turns: int = 0  # turns answered with 429
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were not computed again
    fetched_tokens: int = 0  # cached tokens that another node sent meanwhile
    computed_tokens: int = 0  # of prompts; the rest was cached
    completion_tokens: int = 0  # of answers, also of broken ones
    compute_s: float = 0.0  # of prefill and decode on nodes, as far as they report it
    saved_s: float = 0.0  # prefill saved by cached tokens, minus fetching and loading them


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Usage of one tenant in one period."""

    tenant: TenantId
    period: Period
    start_s: int  # since 1970, UTC
    counts: Counts


class TenantUsage:
    """Usage of all tenants; used on the router's event loop."""

    def __init__(self, clock: Clock, rows: tuple[UsageRow, ...] = ()) -> None:
        """Continue from stored rows."""
        self._clock = clock
        self._rows: dict[tuple[TenantId, Period, int], Counts] = {}
        self._swept_hour = -1.0
        self.changes = 0
        self.take(rows)

    def take(self, rows: tuple[UsageRow, ...]) -> None:
        """Add stored rows to what was counted since."""
        for row in rows:
            have = self._counts(row.tenant, row.period, row.start_s)
            for field in fields(Counts):
                more = getattr(row.counts, field.name)
                setattr(have, field.name, getattr(have, field.name) + more)

    def note_admission(self, tenant: TenantId, first: Admitted) -> None:
        """Count the prompt of a turn that a node has admitted."""
        for counts in self._now(tenant):
            counts.prompt_tokens += first.prompt_tokens
            counts.cached_tokens += first.cached_tokens
            counts.fetched_tokens += first.fetched_tokens or 0
            counts.computed_tokens += computed_tokens(first)

    def note_end(
        self,
        tenant: TenantId,
        completion_tokens: int,
        times: TurnTimes | None,
        *,
        is_ok: bool,
        saved_s: float = 0.0,
    ) -> None:
        """Count the end of a turn, and its answer."""
        compute_s = times.prefill_s + times.decode_s if times is not None else 0.0
        for counts in self._now(tenant):
            counts.turns += is_ok
            counts.broken_turns += not is_ok
            counts.completion_tokens += completion_tokens
            counts.compute_s += compute_s
            counts.saved_s += saved_s

    def note_refusal(self, tenant: TenantId) -> None:
        """Count a turn that was answered with 429."""
        for counts in self._now(tenant):
            counts.refused_turns += 1

    def rows(self, tenant: TenantId | None = None, period: Period | None = None) -> list[UsageRow]:
        """Return rows of a tenant and a period, or of all; the newest first, then by tenant."""
        found = [
            UsageRow(*key, counts)
            for key, counts in self._rows.items()
            if tenant in (None, key[0]) and period in (None, key[1])
        ]
        return sorted(found, key=lambda row: (-row.start_s, row.tenant, row.period))

    def _now(self, tenant: TenantId) -> Iterator[Counts]:
        now_s = int(self._clock.wall_s())
        for period in Period:
            yield self._counts(tenant, period, now_s - now_s % period.length_s)

    def _counts(self, tenant: TenantId, period: Period, start_s: int) -> Counts:
        self.changes += 1
        key = tenant, period, start_s
        if key not in self._rows:
            self._drop_old()
            self._rows[key] = Counts()
        return self._rows[key]

    def _drop_old(self) -> None:
        """Drop periods that are over for long, once an hour, and the oldest of too many."""
        now_s = self._clock.wall_s()
        hour = now_s // Period.HOUR.length_s
        if hour == self._swept_hour and len(self._rows) < USAGE_ROWS_MAX:
            return
        self._swept_hour = hour
        old = [key for key in self._rows if key[2] < now_s - key[1].kept_s]
        if not old and len(self._rows) >= USAGE_ROWS_MAX:
            old = [min(self._rows, key=lambda key: key[2] + key[1].length_s)]
        for key in old:
            del self._rows[key]


def computed_tokens(first: Admitted) -> int:
    """Return the tokens of a prompt that its node computes."""
    return max(0, first.prompt_tokens - first.cached_tokens)


def saved_s(recompute_s: float, times: TurnTimes | None) -> float:
    """Return the seconds by which reuse shortened a turn; 0 if its times are not known.

    `recompute_s` is what computing its cached tokens would have taken.
    """
    return 0.0 if times is None else max(0.0, recompute_s - times.fetch_s - times.load_s)


class UsageFile:
    """Stored usage in a file of the router's data folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[UsageRow, ...]:
        """Return the stored rows; none if the file is missing, and, with a warning, if damaged."""
        try:
            with self._path.open("rb") as file:
                return decode_usage(file.read(USAGE_BYTES_MAX + 1))
        except FileNotFoundError:
            return ()
        except (OSError, RejectedError) as error:
            _LOG.warning("the stored usage %s is ignored: %s", self._path, error)
            return ()

    async def write(self, rows: list[UsageRow]) -> bool:
        """Replace the file atomically; return False, and log it, if the disk refuses."""
        try:
            await asyncio.to_thread(write_private, self._path, encode_usage(rows))
        except OSError as error:
            _LOG.warning("cannot write the usage of tenants: %s", error.strerror)
            return False
        return True


def encode_usage(rows: list[UsageRow]) -> str:
    """Return the text of a file: a line of counters for each row."""
    listed = [
        [row.tenant, row.period.value, row.start_s, *asdict(row.counts).values()] for row in rows
    ]
    names = [field.name for field in fields(Counts)]
    return json.dumps({"format": FORMAT, "counters": names, "rows": listed}, separators=(",", ":"))


def decode_usage(raw: bytes) -> tuple[UsageRow, ...]:
    """Decode a file; raise RejectedError if it is damaged or of an unknown format."""
    if len(raw) > USAGE_BYTES_MAX:
        message = f"it has more than {USAGE_BYTES_MAX} bytes"
        raise RejectedError(message)
    stored = parse_json(raw)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        message = f"its format is not {FORMAT}"
        raise RejectedError(message)
    names, listed = stored.get("counters"), stored.get("rows")
    if not isinstance(names, list) or not isinstance(listed, list):
        message = "its counters or rows are missing"
        raise RejectedError(message)
    return tuple(_row(names, row) for row in listed)


def _row(names: list[str], row: object) -> UsageRow:
    if not isinstance(row, list) or len(row) != len(names) + 3:
        message = "a row has more or fewer numbers than there are counters"
        raise RejectedError(message)
    tenant, period, start_s, *numbers = row
    counts: Counts = from_plain(Counts, dict(zip(names, numbers, strict=True)), "usage")
    if any(getattr(counts, field.name) < 0 for field in fields(Counts)):
        message = "a counter is negative"
        raise RejectedError(message)
    return UsageRow(
        parse_tenant_id(tenant),
        from_plain(Period, period, "period"),
        from_plain(int, start_s, "start_s"),
        counts,
    )


class UsageKeeper:
    """Writer that stores usage while it changes, and once more at the end."""

    def __init__(self, usage: TenantUsage, file: UsageFile | None) -> None:
        """Add what the file has; without a file, nothing is stored."""
        self._usage = usage
        self._file = file
        if file is not None:
            usage.take(file.read())
        self._stored = usage.changes

    async def run(self) -> None:
        """Store changes until cancelled."""
        while True:
            await asyncio.sleep(USAGE_SAVE_S)
            await self.store()

    async def store(self) -> None:
        """Store what has changed."""
        changes = self._usage.changes
        if self._file is None or changes == self._stored:
            return
        if await self._file.write(self._usage.rows()):
            self._stored = changes
