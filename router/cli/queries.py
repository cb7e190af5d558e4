"""`macfabric status`, `nodes`, `agents` and `agent`: show the state of a fabric."""

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from router.cli.endpoint import add_agent_id, add_fabric_options, agent_of, fabric_of
from router.cli.errors import FAILED
from router.cli.node_report import COLUMNS, WIDE_COLUMNS, node_cells, problems, shown_state
from router.cli.output import (
    human_bytes,
    human_count,
    human_seconds,
    human_value,
    print_answer,
    print_pairs,
    print_table,
)
from router.cli.terminal import print_json, print_line
from router.client.client import Fabric
from router.client.http_api import UNAVAILABLE, RefusedError

_DAY_S = 86_400
# What agents may be sorted by, the most first.
_ORDERS: Mapping[str, Callable[[dict[str, Any]], float]] = MappingProxyType(
    {
        "tokens": lambda agent: agent.get("tokens") or 0,
        "memory": lambda agent: _tiers(agent).get("hot") or 0,
        "disk": lambda agent: _tiers(agent).get("disk") or 0,
        "used": lambda agent: agent.get("used_s") or 0.0,
    }
)


def add_queries(commands: Any) -> None:
    """Declare the commands."""
    status = commands.add_parser("status")
    status.set_defaults(run=run_status)
    nodes = commands.add_parser("nodes")
    nodes.add_argument("--state", help="list only nodes in this state, such as ready or drained")
    nodes.add_argument(
        "--wide",
        action="store_true",
        help="also list turns, speeds, memory pressure, heat, version, and how the process before "
        "this one ended",
    )
    nodes.set_defaults(run=run_nodes)
    agents = commands.add_parser("agents")
    agents.add_argument(
        "--why", metavar="ID", help="list this agent's last turns, and why each was not hot"
    )
    agents.add_argument(
        "--tenant", metavar="NAME", help="for operators: a tenant's agents, or '*' for all"
    )
    agents.add_argument("--node", metavar="NODE", help="list only agents that this node owns")
    agents.add_argument("--tier", choices=("hot", "disk"), help="list only agents in this tier")
    agents.add_argument("--limit", type=int, metavar="N", help="list at most N agents")
    agents.add_argument(
        "--sort",
        choices=tuple(_ORDERS),
        help="sort by most tokens or bytes, or by last use (default: by name)",
    )
    agents.set_defaults(run=run_agents)
    agent = commands.add_parser("agent")
    add_agent_id(agent)
    agent.set_defaults(run=run_agent)
    for parser in (status, nodes, agents, agent):
        add_fabric_options(parser)


def run_status(arguments: argparse.Namespace) -> int:
    """Print the health of a fabric; return 1 if no node of it serves."""
    fabric = fabric_of(arguments)
    health = fabric.health()
    status = FAILED if health.get("status") == UNAVAILABLE else 0
    nodes, router = fabric.nodes(), _router(fabric)
    is_operator = any("pid" in node for node in nodes)  # tenants see their own part of tokens
    agents = fabric.agents(tenant="*") if is_operator else fabric.agents()
    if arguments.json:
        parts = {"health": health, "nodes": nodes, "agents": len(agents), "router": router}
        print_json({"url": fabric.url, **parts})
        return status
    usable = sum(node.get("state") == "ready" for node in nodes)
    print_pairs(
        [
            ("url", fabric.url),
            *([("listens at", ", ".join(health["urls"]))] if health.get("urls") else []),
            ("health", health.get("status", "ok")),
            *_router_pairs(router),
            ("nodes", f"{len(nodes)}, {usable} ready"),
            ("models", ", ".join(sorted({str(node.get("model")) for node in nodes})) or "-"),
            ("agents", human_count(len(agents))),
            ("tokens", human_count(_total(nodes, "tokens"))),
            ("in memory", human_bytes(_total((_tiers(node) for node in nodes), "hot"))),
            ("on disk", human_bytes(_total((_tiers(node) for node in nodes), "disk"))),
            *_savings(fabric),
        ]
    )
    if router.get("problem"):
        print_line(f"warning: {router['problem']}")
    now_s = time.time()  # noqa: TID251 - ages for people
    for problem in problems(health, nodes, now_s):
        print_line(f"warning: {problem}")
    return status


def run_nodes(arguments: argparse.Namespace) -> int:
    """Print the nodes."""
    nodes = fabric_of(arguments).nodes()
    if arguments.state is not None:
        nodes = [row for row in nodes if arguments.state in (row.get("state"), shown_state(row))]
    if arguments.json:
        print_json(nodes)
        return 0
    columns = WIDE_COLUMNS if arguments.wide else COLUMNS
    print_table("Nodes", columns, (node_cells(node, wide=arguments.wide) for node in nodes))
    return 0


def run_agents(arguments: argparse.Namespace) -> int:
    """Print the agents, or the last turns of one."""
    if arguments.why is not None:
        return _run_why(arguments)
    named = {name: getattr(arguments, name) for name in ("tenant", "node", "tier")}
    filters = {name: value for name, value in named.items() if value is not None}
    order = _ORDERS.get(arguments.sort)
    limit = arguments.limit if order is None else None
    agents = fabric_of(arguments).agents(limit, **filters)
    if order is not None:
        agents = sorted(agents, key=order, reverse=True)[: arguments.limit]
    if arguments.json:
        print_json(agents)
        return 0
    columns = (
        *("agent", "node", "state", "tokens", "memory", "disk"),
        *("branches", "match", "reused", "why"),
    )
    print_table("Agents", columns, (_agent_row(agent) for agent in agents))
    return 0


def _run_why(arguments: argparse.Namespace) -> int:
    turns = fabric_of(arguments).agent(arguments.why).turns(arguments.tenant)
    if arguments.json:
        print_json(turns)
        return 0
    columns = (
        *("turn", "at", "node", "from", "reused", "first token", "waited", "moved", "loaded"),
        *("fetched", "computed", "answered", "why"),
    )
    print_table(f"Turns of {arguments.why}", columns, (_turn_row(turn) for turn in turns))
    return 0


def _turn_row(turn: dict[str, Any]) -> tuple[object, ...]:
    times = turn.get("times") or {}
    names = ("first_token_s", "queue_s", "move_s", "load_s", "fetch_s", "prefill_s", "decode_s")
    return (
        turn.get("id"),
        human_value("at_s", turn.get("at_s")),
        turn.get("node"),
        turn.get("cache"),
        f"{human_count(turn.get('cached_tokens'))}/{human_count(turn.get('prompt_tokens'))}",
        *(human_seconds(times.get(name)) for name in names),
        "; ".join(str(why) for why in (turn.get("not_hot"), turn.get("reason")) if why),
    )


def run_agent(arguments: argparse.Namespace) -> int:
    """Print one agent with all its fields."""
    agent = agent_of(arguments).show()
    pairs = ((name.removesuffix("_s"), human_value(name, value)) for name, value in agent.items())
    return print_answer(agent, pairs, as_json=arguments.json)


def _agent_row(agent: dict[str, Any]) -> tuple[object, ...]:
    match = agent.get("last_match") or {}
    reused = "-"
    if match:
        reused = (
            f"{human_count(match.get('cached_tokens'))}/{human_count(match.get('prompt_tokens'))}"
        )
    return (
        agent.get("agent") or agent.get("id"),
        agent.get("node") or agent.get("owner"),
        agent.get("state", "-"),
        human_count(agent.get("tokens")),
        human_bytes(_tiers(agent).get("hot")),
        human_bytes(_tiers(agent).get("disk")),
        human_count(agent.get("branches")),
        match.get("kind", "-"),
        reused,
        match.get("reason") or match.get("why") or "-",
    )


def _router(fabric: Fabric) -> dict[str, Any]:
    """Return the role of the fabric's router; empty if its version has none."""
    try:
        return fabric.router()
    except RefusedError:
        return {}


def _router_pairs(router: dict[str, Any]) -> list[tuple[str, object]]:
    """Return a line about the router's role, in fabrics that may have several."""
    if router.get("role") in (None, "sole"):
        return []
    votes = f"{router.get('voters_answering')} of {router.get('voters')} voters answer"
    active = "" if router["role"] == "active" else f"; active: {router.get('active_url') or 'none'}"
    return [("router", f"{router['role']}, term {router.get('term')}, {votes}{active}")]


def _tiers(row: dict[str, Any]) -> dict[str, Any]:
    tiers = row.get("bytes")
    return tiers if isinstance(tiers, dict) else {}


def _total(rows: Iterable[dict[str, Any]], key: str) -> int:
    return sum(value for row in rows if isinstance(value := row.get(key), int))


def _savings(fabric: Fabric) -> list[tuple[str, object]]:
    """Return a line about what reuse saved today (UTC), of the tenants that the key may see."""
    try:
        rows = fabric.usage(period="day").get("data") or []
    except RefusedError:  # an older router
        return []
    now_s = time.time()  # noqa: TID251 - a label for people
    today = [row for row in rows if row.get("start_s", 0) + _DAY_S > now_s]
    cached, prompt = _total(today, "cached_tokens"), _total(today, "prompt_tokens")
    if not cached:
        return []
    saved_s = human_seconds(sum(row.get("saved_s") or 0.0 for row in today))
    tokens = f"{human_count(cached)} of {human_count(prompt)} prompt tokens"
    return [("saved today", f"{saved_s} of computing: {tokens} were reused")]
