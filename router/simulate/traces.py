"""Traces as JSON lines: one turn a row, its prompt as ids of blocks.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

This is the format of Mooncake's published traces: milliseconds, and BLOCK_TOKENS tokens per id, or
as many as `block_length` says. A router's own log has `ttft_ms` and `node`, too: what happened.
Without further fields each row is a turn of an agent of its own, at its time. With `session_id`,
rows are turns of one agent: each starts `delay` and `tool_wait_ms` milliseconds after the rows that
it waits for have ended (those that it names in `wait_for` by their `id`, else the one before it in
its session), but not before its `timestamp`. Rows of a session with a `branch` belong to agents of
their own.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fabric.errors import RejectedError
from fabric.ids import AgentId
from router.limits import SIMULATED_TRACE_LINE_BYTES_MAX
from router.simulate.content import ContentChain, Extent, segment
from router.simulate.sessions import Arrival, ClientTurn

BLOCK_TOKENS: Final = 512
_BLOCK: Final = 0x626C6F63  # kinds of segments
_ANSWER: Final = 0x616E7377
_MESSAGE: Final = 0x6D7367
_NUMBERS: Final = (
    *("timestamp", "delay", "tool_wait_ms", "input_length", "output_length"),
    *("block_length", "ttft_ms"),
)
_LISTS: Final = ("hash_ids", "wait_for")
_FIELDS: Final = frozenset(
    (*_NUMBERS, *_LISTS, "id", "session_id", "branch", "continues", "type", "turn", "node")
)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """Turn of a trace."""

    name: str
    session: str
    agent: AgentId
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    at_s: float | None
    delay_s: float
    waits_for: tuple[str, ...]
    block_tokens: int = BLOCK_TOKENS
    ttft_s: float | None = None  # time to first token in the log
    continues: bool = False  # its prompt begins with the agent's row before and the answer


def read_trace(path: Path) -> list[TraceRow]:
    """Read a trace; raise RejectedError that names the first wrong line."""
    rows: list[TraceRow] = []
    last_of: dict[str, str] = {}
    session_of: dict[str, str] = {}
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(SIMULATED_TRACE_LINE_BYTES_MAX + 1):
            number += 1
            if line.isspace():
                continue
            try:
                row = _row(line, number, last_of)
                _require_earlier(row, session_of)
            except ValueError as error:
                message = f"{path}:{number}: {error}"
                raise RejectedError(message, code="invalid_trace") from None
            rows.append(row)
            session_of[row.name] = row.session
            last_of[row.session] = row.name
    if not rows:
        message = f"{path}: the trace has no rows"
        raise RejectedError(message, code="invalid_trace")
    return rows


def _row(line: bytes, number: int, last_of: Mapping[str, str]) -> TraceRow:
    if len(line) > SIMULATED_TRACE_LINE_BYTES_MAX:
        message = f"a row has at most {SIMULATED_TRACE_LINE_BYTES_MAX} bytes"
        raise ValueError(message)
    item = json.loads(line)
    if not isinstance(item, dict):
        message = "a row must be an object"
        raise ValueError(message)  # noqa: TRY004 - a fault of the file
    unknown = sorted(item.keys() - _FIELDS)
    if unknown:
        message = f"unknown field {unknown[0]!r}"
        raise ValueError(message)
    name = str(item.get("id", f"row-{number}"))
    session = str(item.get("session_id", name))
    branch = item.get("branch")
    agent = session if branch is None else f"{session}.{branch}"
    input_tokens, output_tokens = _count(item, "input_length"), _count(item, "output_length")
    blocks = tuple(_integer(each) for each in _list(item, "hash_ids"))
    block_tokens = _count(item, "block_length") if "block_length" in item else BLOCK_TOKENS
    if len(blocks) != -(-input_tokens // block_tokens):
        message = f"{input_tokens} tokens are {-(-input_tokens // block_tokens)} hash_ids"
        raise ValueError(message)
    at_s = _seconds(item, "timestamp") if "timestamp" in item else None
    waits = tuple(str(each) for each in _list(item, "wait_for"))
    if not waits and session in last_of:
        waits = (last_of[session],)
    if at_s is None and not waits:
        at_s = 0.0
    delay_s = _seconds(item, "delay") + _seconds(item, "tool_wait_ms")
    return TraceRow(
        name=name,
        session=session,
        agent=AgentId(agent),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        blocks=blocks,
        at_s=at_s,
        delay_s=delay_s,
        waits_for=waits,
        block_tokens=block_tokens,
        ttft_s=_seconds(item, "ttft_ms") if "ttft_ms" in item else None,
        continues=_flag(item, "continues"),
    )


def _require_earlier(row: TraceRow, session_of: Mapping[str, str]) -> None:
    if row.name in session_of:
        message = f"the id {row.name!r} occurs twice"
        raise ValueError(message)
    for name in row.waits_for:
        if session_of.get(name) != row.session:
            message = f"wait_for names {name!r}, which is not an earlier row of the session"
            raise ValueError(message)


def _list(item: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = item.get(name, [])
    if not isinstance(value, list):
        message = f"{name} must be a list"
        raise ValueError(message)  # noqa: TRY004 - a fault of the file
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        message = f"hash_ids must be whole numbers from 0, not {value!r}"
        raise ValueError(message)
    return value


def _flag(item: Mapping[str, Any], name: str) -> bool:
    value = item.get(name, False)
    if not isinstance(value, bool):
        message = f"{name} must be true or false, not {value!r}"
        raise ValueError(message)  # noqa: TRY004 - a fault of the file
    return value


def _count(item: Mapping[str, Any], name: str) -> int:
    value = item.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        message = f"{name} must be a whole number of at least 1, not {value!r}"
        raise ValueError(message)
    return value


def _seconds(item: Mapping[str, Any], name: str) -> float:
    value = item.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        message = f"{name} must be milliseconds from 0 to 1e12, not {value!r}"
        raise ValueError(message)
    return value / 1000


@dataclass(slots=True)
class _Waiting:
    """Row with the rows that it waits for, and those that wait for it."""

    row: TraceRow
    number: int
    missing: int = 0
    followers: list["_Waiting"] = field(default_factory=list)


class TraceSession:
    """Rows of one session, each after those that it waits for and not before its time."""

    def __init__(self, rows: Sequence[TraceRow], speedup: float = 1.0) -> None:
        """Divide all times of the trace by `speedup`; delays keep their length."""
        self._speedup = speedup
        self._rows = [_Waiting(row, number) for number, row in enumerate(rows)]
        by_name = {waiting.row.name: waiting for waiting in self._rows}
        for waiting in self._rows:
            for name in waiting.row.waits_for:
                by_name[name].followers.append(waiting)
                waiting.missing += 1
        self._continued = {row.agent for row in rows if row.continues}
        self._contents: dict[AgentId, ContentChain] = {}  # of conversations that continue
        free = (self._at_s(waiting.row) for waiting in self._rows if not waiting.missing)
        self.begins_s = min(free)

    def begin(self) -> Sequence[ClientTurn]:
        ready = [waiting for waiting in self._rows if not waiting.missing]
        return [self._turn(each, self._at_s(each.row) - self.begins_s) for each in ready]

    def answer(self, turn: ClientTurn) -> None:
        """Add the answer where a later row continues it; else that row's prompt has its blocks."""
        if turn.agent in self._continued:
            name = segment(_ANSWER, turn.prompt.last, turn.number)
            turn.prompt.content.append(name, turn.answer_tokens)
            self._contents[turn.agent] = turn.prompt.content

    def after(self, turn: ClientTurn, now_s: float) -> Sequence[ClientTurn]:
        ready: list[ClientTurn] = []
        for follower in self._rows[turn.number].followers:
            follower.missing -= 1
            if not follower.missing:
                row = follower.row
                ready.append(self._turn(follower, max(row.delay_s, self._at_s(row) - now_s)))
        return ready

    def _at_s(self, row: TraceRow) -> float:
        return (row.at_s or 0.0) / self._speedup

    def _turn(self, waiting: _Waiting, delay_s: float) -> ClientTurn:
        row, number = waiting.row, waiting.number
        before = self._contents.get(row.agent) if row.continues else None
        if before is not None and before.tokens < row.input_tokens:
            before.append(segment(_MESSAGE, before.pieces[-1]), row.input_tokens - before.tokens)
            prompt = Extent.of(before)
        else:
            prompt = _prompt(row)
        return ClientTurn(self, row.agent, prompt, row.output_tokens, delay_s, number=number)


def _prompt(row: TraceRow) -> Extent:
    content, left_tokens = ContentChain(), row.input_tokens
    for block in row.blocks:
        content.append(segment(_BLOCK, block), min(left_tokens, row.block_tokens))
        left_tokens -= row.block_tokens
    return Extent.of(content)


def arrivals_of(rows: Iterable[TraceRow], speedup: float = 1.0) -> Iterator[Arrival]:
    """Yield a trace's sessions in order of their starts, with times divided by `speedup`."""
    sessions: dict[str, list[TraceRow]] = {}
    for row in rows:
        sessions.setdefault(row.session, []).append(row)
    replayed = [TraceSession(of_one, speedup) for of_one in sessions.values()]
    for session in sorted(replayed, key=lambda each: each.begins_s):
        yield Arrival(session.begins_s, session)
