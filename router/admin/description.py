"""OpenAPI descriptions of the fabric's own routes: agents, nodes, operations."""

from dataclasses import fields
from typing import Final

from router.admin import directives_description as directives
from router.admin.agents import MIGRATE_BODY, PIN_BODY
from router.admin.copies import FORK_BODY, PREFETCH_BODY, REPLICATE_BODY
from router.admin.decisions import PATH as DECISIONS_PATH
from router.admin.decisions import TRACE, TRACE_TYPE
from router.admin.events import LAST_ID_HEADER
from router.admin.generate import GENERATE_BODY, PATH
from router.admin.nodes import FLUSH_BODY
from router.admin.views.agents import AGENT as AGENT_SHAPE
from router.admin.views.agents import PIN
from router.admin.views.moves import FORK, MIGRATION, PREFETCH, REPLICA, RESUMED
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
from router.placement.terms import Terms

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


_AGENTS: Final = (
    GENERATE_ROUTE,
    Described(
        "GET",
        "/v1/agents",
        "agents",
        "The tenant's agents.",
        {JSON: listing(ref("Agent"), complete=FLAG, unheard=array(text()), unmet=integer())},
        TENANTS,
    ),
    Described(
        "GET",
        "/v1/agents/{agent}",
        "agents",
        "One agent: owner, epoch, size, tiers, copies, last match.",
        {JSON: ref("Agent")},
        NAMED,
        parameters=(AGENT,),
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
        object=one_of("placement.decision"),
        at_s=number(),
        agent=text(),
        node=text(),
        how=one_of("stay", "move", "load", "recompute"),
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
    ),
    **{"from": nullable(text())},
)
_NODES: Final = (
    Described(
        "GET",
        DECISIONS_PATH,
        "nodes",
        "The last placement decisions, with their terms and outcomes.",
        {JSON: listing(_DECISION), TRACE_TYPE: text()},
        _OPERATORS,
        parameters=(
            Parameter("limit", "query", integer(1), "Entries of a list; 100 by default."),
            Parameter("format", "query", one_of("list", TRACE), "A trace is for the simulator."),
        ),
        key="operator",
    ),
    Described(
        "GET",
        "/v1/nodes",
        "nodes",
        "Nodes and the progress of drains; details for operators only.",
        {JSON: listing(ref("Node"))},
        TENANTS,
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
    *_NODES,
    Described(
        "GET",
        "/v1/events",
        "fabric",
        "Events of agents, moves, nodes and links.",
        {EVENTS: EVENT},
        TENANTS,
        parameters=(Parameter(LAST_ID_HEADER, "header", text(), "Continues after that event."),),
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
    _health("/health"),
    _health("/healthz"),
    Described("HEAD", "/", "fabric", "Answers without a body if the router runs.", {}, EVERYWHERE),
)
