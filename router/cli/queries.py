"""`macfabric status`, `nodes`, `agents` and `agent`: show the state of a fabric."""

import argparse
from collections.abc import Iterable
from typing import Any

from router.cli.endpoint import add_agent_id, add_fabric_options, agent_of, fabric_of
from router.cli.errors import FAILED
from router.cli.output import (
    failed_again,
    human_bytes,
    human_count,
    human_value,
    print_answer,
    print_pairs,
    print_table,
)
from router.cli.terminal import print_json, print_line
from router.client.client import Fabric
from router.client.http_api import UNAVAILABLE, RefusedError


def add_queries(commands: Any) -> None:
    """Declare the commands."""
    status = commands.add_parser("status", help="show whether a fabric runs, and its health")
    status.set_defaults(run=run_status)
    nodes = commands.add_parser("nodes", help="list the nodes")
    nodes.set_defaults(run=run_nodes)
    agents = commands.add_parser("agents", help="list the agents and how their last turn matched")
    agents.set_defaults(run=run_agents)
    agent = commands.add_parser("agent", help="show one agent")
    add_agent_id(agent)
    agent.set_defaults(run=run_agent)
    for parser in (status, nodes, agents, agent):
        add_fabric_options(parser)


def run_status(arguments: argparse.Namespace) -> int:
    """Print the health of a fabric; return 1 if no node of it serves."""
    fabric = fabric_of(arguments)
    health = fabric.health()
    status = FAILED if health.get("status") == UNAVAILABLE else 0
    nodes, agents, router = fabric.nodes(), fabric.agents(), _router(fabric)
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
        ]
    )
    if router.get("problem"):
        print_line(f"warning: {router['problem']}")
    for node in nodes:
        if node.get("failure"):
            again = failed_again(node["failure"], node.get("starts_again_in_s"))
            print_line(f"warning: {node.get('name')} {again}")
        for problem in _problems(node):
            print_line(f"warning: {node.get('name')}: {problem}")
    return status


def run_nodes(arguments: argparse.Namespace) -> int:
    """Print the nodes."""
    nodes = fabric_of(arguments).nodes()
    if arguments.json:
        print_json(nodes)
        return 0
    columns = ("node", "state", "host", "pid", "model", "agents", "tokens", "memory", "disk")
    print_table(
        "Nodes",
        columns,
        (
            (
                node.get("name"),
                node.get("state"),
                node.get("host"),
                node.get("pid"),
                node.get("model"),
                human_count(node.get("agents")),
                human_count(node.get("tokens")),
                human_bytes(_tiers(node).get("hot")),
                human_bytes(_tiers(node).get("disk")),
            )
            for node in nodes
        ),
    )
    return 0


def run_agents(arguments: argparse.Namespace) -> int:
    """Print the agents."""
    agents = fabric_of(arguments).agents()
    if arguments.json:
        print_json(agents)
        return 0
    columns = (
        *("agent", "node", "state", "tokens", "memory", "disk"),
        *("branches", "match", "reused", "why"),
    )
    print_table("Agents", columns, (_agent_row(agent) for agent in agents))
    return 0


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


def _problems(node: dict[str, Any]) -> list[str]:
    test = node.get("self_test") or {}
    problems = (
        [] if test.get("passed", True) else [f"its cache self-test failed: {test.get('detail')}"]
    )
    return problems + ([str(node["degraded"])] if node.get("degraded") else [])
