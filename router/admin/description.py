"""The fabric's own routes as the OpenAPI document describes them: agents, nodes, operations."""

from typing import Final

from router.admin import directives_description as directives
from router.admin.events import LAST_ID_HEADER
from router.admin.generate_description import AGENT, GENERATE
from router.api.description import (
    AGENT_ID,
    EVENT,
    EVENTS,
    EVERYWHERE,
    FLAG,
    JSON,
    NAMED,
    TENANTS,
    WRITES,
    Described,
    Parameter,
    Schema,
    answer,
    array,
    body,
    integer,
    listing,
    nullable,
    number,
    one_of,
    ref,
    text,
)

_FILE: Final = "application/octet-stream"
_OPERATORS: Final = (*TENANTS, 404, 409)
_BYTES: Final = answer(hot=integer(), disk=integer())
_TIERS: Final = array(one_of("hot", "disk"))
_COST: Final = {
    "blocks_sent": integer(),
    "blocks_reused": integer(),
    "bytes_sent": integer(),
    "seconds": number(),
}
_REPLICA: Final = answer(
    id=AGENT_ID,
    object=one_of("agent.replica"),
    owner=text(),
    node=text(),
    epoch=integer(1),
    revision=integer(),
    tokens=integer(),
    kept=FLAG,
    **_COST,
)
SCHEMAS: Final[dict[str, Schema]] = {
    "Agent": answer(
        id=AGENT_ID,
        object=one_of("agent"),
        alias=text(),
        owner=nullable(text()),
        state=text(),
        epoch=integer(),
        group=nullable(text()),
        revision=integer(),
        tokens=integer(),
        blocks=integer(),
        bytes=_BYTES,
        tiers=_TIERS,
        durable=FLAG,
        busy=FLAG,
        created_s=nullable(number(None)),
        used_s=nullable(number(None)),
        last_match=nullable(
            answer(kind=text(), cached_tokens=integer(), prompt_tokens=integer(), reason=text())
        ),
        replicas=array(text()),
        erasing=array(text()),
        copies=array(
            answer(
                node=text(),
                epoch=integer(),
                revision=integer(),
                tokens=integer(),
                current=FLAG,
                kept=FLAG,
                tiers=_TIERS,
                bytes=_BYTES,
            )
        ),
        pinned=FLAG,
        pin_held=FLAG,
        **directives.OF_AN_AGENT,
    ),
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
    "AgentReplica": _REPLICA,
    "AgentPrefetch": answer(
        id=AGENT_ID,
        object=one_of("agent.prefetch"),
        node=text(),
        tiers=_TIERS,
        tokens=integer(),
        bytes=_BYTES,
    ),
    "Drain": answer(
        node=text(),
        object=one_of("node.drain"),
        state=text(),
        stuck=array(answer(id=AGENT_ID, code=text(), message=text())),
    ),
    "Node": answer(name=text(), state=text(), drain=nullable(ref("Drain"))),
    "Health": answer(status=one_of("ok", "partial", "degraded", "unavailable", "draining")),
}
_NODE: Final = Parameter("node", "path", text(), "A node's name.")
_RUNS: Final = Parameter(
    "runs", "query", FLAG, "Ended runs of scenarios that it took part in, which quote it, go too."
)
_SIGNING: Final = Parameter(
    "x-macfabric-signing-key", "header", text(pattern="^[0-9a-f]{64}$"), "For another fabric."
)


def _verb(
    verb: str, says: str, told: Schema, asked: Schema | None, *, needs_body: bool = True
) -> Described:
    return Described(
        "POST",
        f"/v1/agents/{{agent}}/{verb}",
        "agents",
        says,
        {JSON: told},
        WRITES,
        body=asked,
        needs_body=needs_body,
        parameters=(AGENT,),
    )


_AGENTS: Final = (
    GENERATE,
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
        "Erases it everywhere, with a receipt.",
        {JSON: ref("AgentDeleted")},
        WRITES,
        parameters=(AGENT, _RUNS),
    ),
    _verb(
        "migrate",
        "Moves the agent, also in the middle of an answer.",
        answer(
            id=AGENT_ID,
            **{"from": text()},
            to=text(),
            epoch=integer(1),
            pause_seconds=number(),
            **_COST,
        ),
        body({"to": text()}),
    ),
    _verb(
        "fork",
        "Makes a new agent with this one's context.",
        answer(
            id=AGENT_ID,
            object=one_of("agent.fork"),
            forked_from=AGENT_ID,
            node=text(),
            epoch=integer(1),
            tokens=integer(),
            **_COST,
        ),
        body({"as": AGENT_ID}, to=text(), operation=text(pattern=directives.OPERATION)),
    ),
    _verb(
        "replicate",
        "Copies it now and, with `keep`, after each turn.",
        ref("AgentReplica"),
        body({"to": text()}, keep=FLAG),
    ),
    _verb(
        "prefetch",
        "Loads it into RAM where it lives, or copies it to another node's disk.",
        {"anyOf": [ref("AgentPrefetch"), ref("AgentReplica")]},
        body({}, to=text()),
        needs_body=False,
    ),
    Described(
        "DELETE",
        "/v1/agents/{agent}/prefetch",
        "agents",
        "Ends a load under way.",
        {JSON: ref("AgentPrefetch")},
        WRITES,
        parameters=(AGENT,),
    ),
    _verb(
        "pin",
        "Makes it the last to be evicted.",
        answer(id=AGENT_ID, object=one_of("agent.pin"), node=text(), pinned=FLAG, pin_held=FLAG),
        body({"pinned": FLAG}),
    ),
    *directives.DESCRIBED,
    Described(
        "POST",
        "/v1/agents/{agent}/hibernate",
        "agents",
        "The agent as one signed file; the agent stays.",
        {_FILE: {}},
        WRITES,
        parameters=(
            AGENT,
            _SIGNING,
            Parameter("x-macfabric-signing-salt", "header", text(), "For another fabric."),
        ),
    ),
    Described(
        "POST",
        "/v1/agents/{agent}/resume",
        "agents",
        "Brings an agent back from its file.",
        {
            JSON: answer(
                id=AGENT_ID,
                object=one_of("agent.resumed"),
                node=text(),
                epoch=integer(1),
                tokens=integer(),
                model=text(),
                blocks_received=integer(),
                blocks_reused=integer(),
                bytes_received=integer(),
            )
        },
        WRITES,
        body={},
        body_type=_FILE,
        parameters=(
            AGENT,
            Parameter("node", "query", text(), "Where to; else the router chooses."),
            Parameter("replace", "query", FLAG, "An agent of that name goes."),
            _SIGNING,
        ),
    ),
)
_NODES: Final = (
    Described(
        "GET",
        "/v1/nodes",
        "nodes",
        "Nodes, and how drains go; details for operators only.",
        {JSON: listing(ref("Node"))},
        TENANTS,
    ),
    Described(
        "POST",
        "/v1/nodes/{node}/drain",
        "nodes",
        "Moves all agents off; 202 while some are left.",
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
        "Lets the node take agents again.",
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
        body=body({}, drop_hot=FLAG),
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
        "What happens to agents, moves, nodes and links, as it happens.",
        {EVENTS: EVENT},
        TENANTS,
        parameters=(Parameter(LAST_ID_HEADER, "header", text(), "Goes on behind that event."),),
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
    _health("/health"),
    _health("/healthz"),
    Described("HEAD", "/", "fabric", "Nothing: somebody is there.", {}, EVERYWHERE),
)
