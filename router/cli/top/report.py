"""A fabric's state as plain figures, and as lines for a terminal of any size."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from fabric.ids import DEFAULT_TENANT
from router.cli.events import event_line
from router.cli.output import (
    human_bytes,
    human_count,
    human_seconds,
    table_lines,
)
from router.cli.top.fleet_state import FleetState, Row

AGENTS_IN_A_PIPE: Final = 20
_EVENTS_IN_JSON: Final = 20
_EVENTS_ROWS_MIN: Final = 4
_NODE_COLUMNS: Final = (
    *("node", "state", "ram", "disk", "act", "wait", "ttft", "decode", "prefill"),
)
_AGENT_COLUMNS: Final = (
    *("agent", "node", "tier", "tokens", "used", "reused", "first", "waited", "loaded"),
    *("computed", "answered"),
)
_MOVE_COLUMNS: Final = ("moving", "from", "to", "state", "sent", "time")


@dataclass(frozen=True, slots=True)
class Line:
    """Line of the screen; `style` is empty, bold, dim, yellow or red."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class BarStyle:
    """Form of a bar: its columns, and whether amounts stand beside it."""

    columns: int
    has_amounts: bool = False
    is_utf8: bool = False

    def draw(self, used: Any, limit: Any) -> str:
        """Draw a share with its percentage, or the amount where the limit is not known."""
        if not isinstance(used, int):
            return "-"
        if not isinstance(limit, int) or limit <= 0:
            return human_bytes(used)
        share = min(1.0, used / limit)
        full, empty = ("█", "░") if self.is_utf8 else ("#", ".")
        filled = round(share * self.columns)
        amounts = f" {human_bytes(used)} of {human_bytes(limit)}" if self.has_amounts else ""
        return f"{full * filled}{empty * (self.columns - filled)} {100 * share:3.0f}%{amounts}"


_BAR_STYLES: Final = (BarStyle(8, has_amounts=True), BarStyle(8), BarStyle(6), BarStyle(4))


def figures(state: FleetState, url: str, at_s: float, agents: int) -> Row:
    """Return the state as plain data, with the `agents` that were used last."""
    return {
        "at_s": round(at_s, 3),
        "url": url,
        "health": state.health,
        "nodes": [_node(state, state.nodes[name]) for name in sorted(state.nodes)],
        "agents": [_agent(state, name) for name in state.last_used(agents)],
        "agents_in_all": len(state.agents) + state.agents_left_out,
        "moves": list(state.moves.values()),
        "events": [
            {"event": event.name, "data": event.data}
            for event in list(state.events)[-_EVENTS_IN_JSON:]
        ],
    }


def _node(state: FleetState, row: Row) -> Row:
    held, usage, memory, free = (
        row.get(part) or {} for part in ("bytes", "usage", "memory", "free")
    )
    hot_limit, disk_limit = memory.get("hot_limit_bytes"), usage.get("disk_limit_bytes")
    if disk_limit is None and isinstance(free.get("disk"), int):
        disk_limit = free["disk"] + (held.get("disk") or 0)
    named = (
        *("name", "state", "model", "agents", "active", "waiting", "queue_s"),
        *("prefill_tokens_per_s", "decode_tokens_per_s", "degraded", "failure"),
    )
    return {
        **{name: row.get(name) for name in named},
        "first_token_s": state.first_token_s(str(row.get("name"))),
        "ram_bytes": held.get("hot"),
        "ram_limit_bytes": hot_limit,
        "disk_bytes": held.get("disk"),
        "disk_limit_bytes": disk_limit,
    }


def _agent(state: FleetState, name: tuple[str | None, str]) -> Row:
    row, turn = state.agents[name], state.turns.get(name) or {}
    tiers = row.get("tiers") or []
    shown = {
        "id": name[1],
        "node": row.get("owner"),
        "tier": tiers[0] if tiers else None,
        "tokens": row.get("tokens"),
        "used_s": row.get("used_s"),
        "busy": row.get("busy"),
        "last_turn": {
            "id": turn.get("turn" if "turn" in turn else "id"),  # an event's, a history's
            **{n: turn.get(n) for n in ("cache", "prompt_tokens", "cached_tokens")},
            **{n: turn.get(n) for n in ("completion_tokens", "outcome", "times")},
        }
        if turn
        else None,
    }
    return shown if name[0] is None else {"tenant": name[0], **shown}


def screen_lines(shown: Row, columns: int, rows: int | None, *, is_utf8: bool) -> list[Line]:
    """Lay out the result of `figures` in lines; `rows` None: as many as needed."""
    head = [Line(_headline(shown, columns), "bold"), Line("")]
    nodes = _node_lines(shown, columns, is_utf8=is_utf8)
    moves = _table(_MOVE_COLUMNS, _move_rows(shown), columns)
    agents = _agent_lines(shown, columns)
    events = [Line(event_line(each["event"], each["data"])) for each in shown["events"]]
    if rows is not None:
        body_rows = rows - len(head)
        nodes = _cut(nodes, max(3, body_rows // 3), "nodes")
        moves = _cut(moves, max(2, body_rows // 6), "moves")
        rows_left = body_rows - sum(len(part) + 1 for part in (nodes, moves) if part)
        agents = _cut(agents, max(2, rows_left - 1 - min(len(events), _EVENTS_ROWS_MIN)), "agents")
        events = events[-max(1, rows_left - 1 - len(agents)) :]
    parts = [nodes, agents, moves, events]
    body = [line for part in parts if part for line in (*part, Line(""))]
    return [*head, *body[:-1]][:rows]


def _headline(shown: Row, columns: int) -> str:
    """Return the first line; a narrow one leaves out the address, then the time."""
    ready = sum(node["state"] == "ready" for node in shown["nodes"])
    at = datetime.fromtimestamp(shown["at_s"], UTC).astimezone()
    moves = f", {len(shown['moves'])} moves" if shown["moves"] else ""
    health = (
        f"{shown['health']}: {ready} of {len(shown['nodes'])} nodes ready, "
        f"{shown['agents_in_all']:,} agents{moves}"
    )
    forms = (f"{shown['url']}  {health}  {at:%H:%M:%S}", f"{health}  {at:%H:%M:%S}", health)
    return next((form for form in forms if len(form) <= columns), health)


def _node_lines(shown: Row, columns: int, *, is_utf8: bool) -> list[Line]:
    """Return a line for each node, and one for each that has a problem."""
    lines: list[Line] = []
    for style in _BAR_STYLES:  # the widest with which all columns fit
        rows = [_node_cells(node, replace(style, is_utf8=is_utf8)) for node in shown["nodes"]]
        (title, *others), left_out = table_lines(_NODE_COLUMNS, rows, columns)
        lines = [Line(title, "dim")]
        if not left_out:
            break
    lines += (
        Line(text, "" if node["state"] == "ready" else "yellow")
        for text, node in zip(others, shown["nodes"], strict=True)
    )
    lines += (
        Line(f"{node['name']}: {problem}", "red")
        for node in shown["nodes"]
        for problem in (node["failure"], node["degraded"])
        if problem
    )
    return lines


def _node_cells(node: Row, style: BarStyle) -> tuple[str, ...]:
    return (
        node["name"],
        node["state"],
        style.draw(node["ram_bytes"], node["ram_limit_bytes"]),
        style.draw(node["disk_bytes"], node["disk_limit_bytes"]),
        human_count(node["active"]),
        human_count(node["waiting"]),
        human_seconds(node["first_token_s"]),
        _rate(node["decode_tokens_per_s"]),
        _rate(node["prefill_tokens_per_s"]),
    )


def _agent_lines(shown: Row, columns: int) -> list[Line]:
    rows = [_agent_cells(agent, shown["at_s"]) for agent in shown["agents"]]
    return _table(_AGENT_COLUMNS, rows, columns)


def _agent_cells(agent: Row, now_s: float) -> tuple[str, ...]:
    turn = agent["last_turn"] or {}
    times, tenant = turn.get("times") or {}, agent.get("tenant")
    used_s = agent["used_s"]
    ago = human_seconds(max(0.0, now_s - used_s)) if isinstance(used_s, int | float) else "-"
    reused = "-"
    if turn.get("prompt_tokens") is not None:
        reused = f"{human_count(turn.get('cached_tokens'))}/{human_count(turn['prompt_tokens'])}"
    waited = ("first_token_s", "queue_s", "load_s", "prefill_s", "decode_s")
    return (
        agent["id"] if tenant in (None, DEFAULT_TENANT) else f"{tenant}/{agent['id']}",
        agent["node"] or "-",
        agent["tier"] or "-",
        human_count(agent["tokens"]),
        "now" if agent["busy"] else ago,
        reused,
        *(human_seconds(times.get(name)) for name in waited),
    )


def _move_rows(shown: Row) -> list[tuple[str, ...]]:
    return [
        (
            str(move.get("id")),
            str(move.get("from")),
            str(move.get("to")),
            str(move.get("state")),
            human_bytes(move.get("bytes_sent")),
            human_seconds(move.get("seconds")),
        )
        for move in shown["moves"]
    ]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> list[Line]:
    """Return a table's lines with the columns that fit; none without rows."""
    (title, *lines), _ = table_lines(names, rows, columns)
    return [Line(title, "dim"), *map(Line, lines)] if lines else []


def _cut(lines: list[Line], count: int, what: str) -> list[Line]:
    """Return at most `count` lines, the last of which counts the others."""
    if len(lines) <= count:
        return lines
    left_out = len(lines) - count + 1
    return [*lines[: count - 1], Line(f"({left_out} more {what})", "dim")]


def _rate(per_s: Any) -> str:
    if not isinstance(per_s, int | float) or per_s <= 0:
        return "-"
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}"
