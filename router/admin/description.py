"""OpenAPI descriptions of the fabric's own routes: agents, nodes, operations."""

from dataclasses import fields
from typing import Final

from fabric.limits import NODES_MAX, TURN_HISTORY_MAX
from fabric.turn.generation import TurnTimes
from router.admin import directives_description as directives
from router.admin.agents import MIGRATE_BODY, PIN_BODY
from router.admin.copies import FORK_BODY, PREFETCH_BODY, REPLICATE_BODY
from router.admin.decisions import FLEET, FLEET_TYPE, TRACE, TRACE_TYPE
from router.admin.decisions import PATH as DECISIONS_PATH
from router.admin.events import LAST_ID_HEADER
from router.admin.generate import GENERATE_BODY, PATH
from router.admin.nodes import FLUSH_BODY
from router.admin.router import RESTART_BODY
from router.admin.turns import PATH as TURNS_PATH
from router.admin.usage import PATH as USAGE_PATH
from router.admin.usage import USAGE
from router.admin.views.agents import AGENT as AGENT_SHAPE
from router.admin.views.agents import PIN
from router.admin.views.moves import FORK, MIGRATION, PREFETCH, REPLICA, RESUMED
from router.admin.views.shape import type_schema
from router.admin.views.turns import TURN
from router.api.openapi import (
    AGENT,
    AGENT_ID,
    EVENT,
    EVENTS,
    EVERYWHERE,
    FLAG,
    JSON,
    NAMED,
    TENANTS,
    TURN_HEADERS,
    WRITES,
    Described,
    Parameter,
    answer,
    array,
    described_turn,
    integer,
    listing,
    number,
    one_of,
    ref,
    text,
    with_rare,
)
from router.http.schema import Schema, nullable
from router.http.turn_headers import AGENT_HEADER
from router.limits import AGENTS_PAGE_MAX, USAGE_PAGE_MAX
from router.placement.decision import How, Terms
from router.turns.tenant_usage import Period

GENERATE_ROUTE: Final = described_turn(
    PATH,
    "agents",
    "Appends a text or messages to the agent's context, and answers.",
    whole=answer(
        id=AGENT_ID,
        object=one_of("agent.generation"),
        node=text(),
        text=text(),
        reasoning=text(),
        tool_calls=array(with_rare(answer(id=text(), name=text(), arguments=text()), broken=FLAG)),
        epoch=integer(1),
        finish_reason=one_of("stop", "length", "tool_calls"),
        prompt_tokens=integer(),
        cached_tokens=integer(),
        completion_tokens=integer(),
        durable=FLAG,
    ),
    body=GENERATE_BODY.schema(),
    parameters=(AGENT, *(header for header in TURN_HEADERS if header.name != AGENT_HEADER)),
)
_FILE: Final = "application/octet-stream"
_OPERATORS: Final = (*TENANTS, 404, 409)
SCHEMAS: Final[dict[str, Schema]] = {
    "Agent": AGENT_SHAPE.schema(),
    "AgentDeleted": answer(
        id=AGENT_ID,
        object=one_of("agent.deleted"),
        deleted=FLAG,
        receipts=array(answer(node=text(), existed=FLAG)),
        blocks_removed=integer(),
        bytes_removed=integer(),
        blocks_kept_shared=integer(),
        derived_agents=integer(),
        derived_tokens=integer(),
        quoting_runs=array(text()),
        removed_runs=array(text()),
        unreachable=array(text()),
        remembered=array(text()),
    ),
    **directives.SCHEMAS,
    "AgentReplica": REPLICA.schema(),
    "AgentPrefetch": PREFETCH.schema(),
    "Drain": answer(
        node=text(),
        object=one_of("node.drain"),
        state=text(),
        stuck=array(answer(id=AGENT_ID, code=text(), message=text())),
    ),
    "Node": answer(name=text(), state=text(), drain=nullable(ref("Drain"))),
    "Router": answer(
        object=one_of("router"),
        role=one_of("sole", "active", "standby"),
        url=text(),
        active_url=text(),
        term=nullable(integer()),
        voters=integer(),
        voters_answering=integer(),
        promoted=FLAG,
        problem=nullable(text()),
    ),
    "Health": answer(status=one_of("ok", "partial", "degraded", "unavailable", "draining")),
}
_NODE: Final = Parameter("node", "path", text(), "A node's name.")
_RUNS: Final = Parameter(
    "runs", "query", FLAG, "Also removes the ended scenario runs that quote the agent."
)
_SIGNING: Final = Parameter(
    "x-macfabric-signing-key",
    "header",
    text(pattern="^[0-9a-f]{64}$"),
    "A key that signs the file, for use in another fabric.",
)


def _verb(
    verb: str, summary: str, answered: Schema, body: Schema | None, *, needs_body: bool = True
) -> Described:
    """Describe POST /v1/agents/{agent}/VERB."""
    return Described(
        "POST",
        f"/v1/agents/{{agent}}/{verb}",
        "agents",
        summary,
        {JSON: answered},
        WRITES,
        body=body,
        needs_body=needs_body,
        parameters=(AGENT,),
    )


def _page(most: int, usual: int | None = None) -> tuple[Parameter, Parameter]:
    """Describe the parameters of a page."""
    says = f"Rows; {usual or most:,} by default."
    return (
        Parameter("limit", "query", integer(1, most), says),
        Parameter("after", "query", text(), "The `last_id` of the previous page."),
    )


_TENANT: Final = Parameter("tenant", "query", text(), "For operators: whose data is shown.")
_PAGED: Final = {"has_more": FLAG, "last_id": nullable(text())}
_AGENTS: Final = (
    GENERATE_ROUTE,
    Described(
        "GET",
        "/v1/agents",
        "agents",
        "The tenant's agents.",
        {
            JSON: listing(
                ref("Agent"), **_PAGED, complete=FLAG, unheard=array(text()), unmet=integer()
            )
        },
        NAMED,
        parameters=(
            *_page(AGENTS_PAGE_MAX),
            Parameter("node", "query", text(), "Only agents that this node owns."),
            Parameter("tier", "query", one_of("hot", "disk"), "Only agents in this tier."),
            Parameter("tenant", "query", text(), "For operators: a tenant, or `*` for all."),
        ),
    ),
    Described(
        "GET",
        "/v1/agents/{agent}",
        "agents",
        "One agent: owner, epoch, size, tiers, copies, last match.",
        {JSON: ref("Agent")},
        NAMED,
        parameters=(AGENT, _TENANT),
    ),
    Described(
        "DELETE",
        "/v1/agents/{agent}",
        "agents",
        "Erases the agent on every node, and returns a receipt.",
        {JSON: ref("AgentDeleted")},
        WRITES,
        parameters=(AGENT, _RUNS),
    ),
    _verb(
        "migrate",
        "Moves the agent, even in the middle of an answer.",
        MIGRATION.schema(),
        MIGRATE_BODY.schema(),
    ),
    _verb(
        "fork",
        "Creates a new agent with this agent's context.",
        FORK.schema(),
        FORK_BODY.schema(),
    ),
    _verb(
        "replicate",
        "Copies the agent to another node, now and, with `keep`, after every turn.",
        ref("AgentReplica"),
        REPLICATE_BODY.schema(),
    ),
    _verb(
        "prefetch",
        "Loads the agent into its node's RAM, or copies it to another node's disk.",
        {"anyOf": [ref("AgentPrefetch"), ref("AgentReplica")]},
        PREFETCH_BODY.schema(),
        needs_body=False,
    ),
    Described(
        "DELETE",
        "/v1/agents/{agent}/prefetch",
        "agents",
        "Cancels a load into RAM.",
        {JSON: ref("AgentPrefetch")},
        WRITES,
        parameters=(AGENT,),
    ),
    _verb(
        "pin",
        "Pins the agent, so that it is evicted last.",
        PIN.schema(),
        PIN_BODY.schema(),
    ),
    *directives.DESCRIBED,
    Described(
        "POST",
        "/v1/agents/{agent}/hibernate",
        "agents",
        "Returns the agent as one signed file; the agent stays.",
        {_FILE: {}},
        WRITES,
        parameters=(
            AGENT,
            _SIGNING,
            Parameter("x-macfabric-signing-salt", "header", text(), "The salt of that key."),
        ),
    ),
    Described(
        "POST",
        "/v1/agents/{agent}/resume",
        "agents",
        "Restores an agent from its file.",
        {JSON: RESUMED.schema()},
        WRITES,
        body={},
        body_type=_FILE,
        parameters=(
            AGENT,
            Parameter("node", "query", text(), "Target node; otherwise the router chooses."),
            Parameter("replace", "query", FLAG, "Replaces an existing agent of that name."),
            _SIGNING,
        ),
    ),
)
_TERMS: Final = answer(**dict.fromkeys((field.name for field in fields(Terms)), number()))
_DECISION: Final = with_rare(
    answer(
        id=text(),
        object=one_of("placement.decision"),
        at_s=number(),
        agent=text(),
        node=text(),
        how=one_of(*How),
        terms=_TERMS,
        first_token_estimate_s=number(),
        outcome=text(),
        served_by=text(),
        prompt_tokens=integer(),
        cached_tokens=integer(),
        cache=text(),
        completion_tokens=integer(),
        admitted_s=number(),
        first_token_s=nullable(number()),
        ended_s=nullable(number()),
        turn=nullable(text()),
        times=nullable(type_schema(TurnTimes)),
    ),
    **{"from": nullable(text())},
)
_TURNS_ROUTE: Final = Described(
    "GET",
    TURNS_PATH,
    "agents",
    "The agent's last turns, the newest first: times, reuse, and why a match ended.",
    {JSON: listing(TURN.schema(), id=AGENT_ID, has_more=FLAG)},
    NAMED,
    parameters=(
        AGENT,
        Parameter("limit", "query", integer(1, TURN_HISTORY_MAX), "Turns; all by default."),
        _TENANT,
    ),
)
_USAGE_ROUTE: Final = Described(
    "GET",
    USAGE_PATH,
    "agents",
    "What the tenant's turns used, by day or hour (UTC), the newest period first.",
    {
        JSON: listing(
            USAGE.schema(),
            has_more=FLAG,
            limits=nullable(
                answer(
                    turns=nullable(integer(1)),
                    tokens_per_minute=nullable(integer(1)),
                    running_turns=nullable(integer()),
                )
            ),
        )
    },
    TENANTS,
    parameters=(
        Parameter("period", "query", one_of(*Period), "`day` by default."),
        Parameter("limit", "query", integer(1, USAGE_PAGE_MAX), "Rows; all by default."),
        _TENANT,
    ),
)
_NODES: Final = (
    Described(
        "GET",
        DECISIONS_PATH,
        "nodes",
        "The last placement decisions, with their terms and outcomes.",
        {JSON: listing(_DECISION), TRACE_TYPE: text(), FLEET_TYPE: text()},
        _OPERATORS,
        parameters=(
            Parameter("limit", "query", integer(1), "Entries of a list; 100 by default."),
            Parameter(
                "format", "query", one_of("list", TRACE, FLEET), "The others are for the simulator."
            ),
        ),
        key="operator",
    ),
    Described(
        "GET",
        "/v1/nodes",
        "nodes",
        "Nodes and the progress of drains; details for operators only.",
        {JSON: listing(ref("Node"), **_PAGED)},
        TENANTS,
        parameters=(
            *_page(NODES_MAX),
            Parameter("state", "query", text(), "Only nodes in this state."),
        ),
    ),
    Described(
        "POST",
        "/v1/nodes/{node}/drain",
        "nodes",
        "Moves all agents off the node; 202 while some are left.",
        {JSON: ref("Drain")},
        _OPERATORS,
        parameters=(_NODE,),
        statuses=(200, 202),
        key="operator",
    ),
    Described(
        "POST",
        "/v1/nodes/{node}/undrain",
        "nodes",
        "Ends a drain: the node takes agents again.",
        {JSON: answer(node=text(), object=one_of("node.drain"), state=one_of("ready"))},
        _OPERATORS,
        parameters=(_NODE,),
        key="operator",
    ),
    Described(
        "POST",
        "/v1/nodes/{node}/restart",
        "nodes",
        "Saves every agent and restarts the node's process with the installed code.",
        {
            JSON: answer(
                node=text(),
                object=one_of("node.restart"),
                incarnation=nullable(integer()),
                detail=text(),
            )
        },
        (*_OPERATORS, 409),
        parameters=(_NODE,),
        body=RESTART_BODY.schema(),
        statuses=(202,),
        key="operator",
    ),
    Described(
        "POST",
        "/v1/nodes/{node}/flush",
        "nodes",
        "Saves every agent; with `drop_hot` also drops their caches in RAM.",
        {JSON: answer(node=text(), detail=text())},
        (*_OPERATORS, 507),
        body=FLUSH_BODY.schema(),
        needs_body=False,
        parameters=(_NODE,),
        key="operator",
    ),
)


def _health(path: str) -> Described:
    return Described(
        "GET",
        path,
        "fabric",
        "Whether a node serves; details for operators only.",
        {JSON: ref("Health")},
        tuple(status for status in EVERYWHERE if status not in (401, 529)),
        statuses=(200, 503),
        key="none",
    )


DESCRIBED: Final = (
    *_AGENTS,
    _TURNS_ROUTE,
    _USAGE_ROUTE,
    *_NODES,
    Described(
        "GET",
        "/v1/events",
        "fabric",
        "Events of agents, moves, nodes and links.",
        {EVENTS: EVENT},
        TENANTS,
        parameters=(
            Parameter(LAST_ID_HEADER, "header", text(), "Continues after that event."),
            Parameter("node", "query", text(), "Only events of this node."),
            Parameter("agent", "query", text(), "Only events of this agent."),
            Parameter("name", "query", text(), "Only events with this name or prefix."),
            Parameter("snapshot", "query", FLAG, "False: begin without a snapshot."),
            Parameter("follow", "query", FLAG, "False: only the past events that are kept."),
            Parameter("limit", "query", integer(1), "Events after which the stream ends."),
            _TENANT,
        ),
    ),
    Described(
        "GET",
        "/metrics",
        "fabric",
        "Counters in Prometheus' text format.",
        {"text/plain": text()},
        TENANTS,
        key="operator",
    ),
    Described(
        "GET",
        "/v1/router",
        "fabric",
        "This router's role among the routers of its fabric.",
        {JSON: ref("Router")},
        TENANTS,
    ),
    Described(
        "POST",
        "/v1/router/promote",
        "fabric",
        "Makes this router the active one with the votes of those that answer.",
        {JSON: ref("Router")},
        (*_OPERATORS, 409),
        key="operator",
    ),
    Described(
        "POST",
        "/v1/router/restart",
        "fabric",
        "Restarts this router's process with the installed code, once its streams have ended.",
        {
            JSON: answer(
                object=one_of("router.restart"),
                wait_s=number(),
                code=text(),
                pid=integer(),
                process=text(),
            )
        },
        (*_OPERATORS, 409),
        body=RESTART_BODY.schema(),
        statuses=(202,),
        key="operator",
    ),
    _health("/health"),
    _health("/healthz"),
    Described("HEAD", "/", "fabric", "Answers without a body if the router runs.", {}, EVERYWHERE),
)
