"""OpenAPI descriptions of the routes of directives and of agents' settings."""

from typing import Final

from router.admin.agent_settings import DECAY_BODY, EVICT_BODY, SHARE_BODY, SUPERSEDE_BODY
from router.admin.directives import ADD_DIRECTIVES_BODY
from router.admin.views.agents import AGENT_DIRECTIVES, AGENT_SETTINGS, MEMORY, REBUILD
from router.api.openapi import (
    AGENT,
    JSON,
    NAMED,
    WRITES,
    Described,
    Parameter,
    ref,
)
from router.http.schema import OPERATION_ID, JsonKind, Schema

_PATH: Final = "/v1/agents/{agent}/directives"
SCHEMAS: Final[dict[str, Schema]] = {
    "AgentDirectives": AGENT_DIRECTIVES.schema(),
    "AgentMemory": MEMORY.schema(),
    "AgentWishes": AGENT_SETTINGS.schema(),
    "AgentRebuild": REBUILD.schema(),
}


def _verb(verb: str, says: str, kind: JsonKind | None, shape: str = "AgentWishes") -> Described:
    path = f"/v1/agents/{{agent}}/{verb}"
    needs = verb in ("share", "supersede")
    schema = None if kind is None else kind.schema()
    return Described(
        "POST", path, "agents", says, {JSON: ref(shape)}, WRITES, body=schema,
        needs_body=needs, parameters=(AGENT,),
    )  # fmt: skip


DESCRIBED: Final = (
    Described(
        "GET",
        _PATH,
        "agents",
        "Lists the messages that directives can name, the active directives, and the undone ones.",
        {JSON: ref("AgentMemory")},
        NAMED,
        parameters=(AGENT,),
    ),
    Described(
        "POST",
        _PATH,
        "agents",
        "Replaces messages of the agent's history from now on, all or none.",
        {JSON: ref("AgentDirectives")},
        WRITES,
        body=ADD_DIRECTIVES_BODY.schema(),
        parameters=(AGENT,),
    ),
    Described(
        "DELETE",
        _PATH,
        "agents",
        "Removes all directives.",
        {JSON: ref("AgentDirectives")},
        WRITES,
        parameters=(AGENT,),
    ),
    Described(
        "DELETE",
        f"{_PATH}/{{operation}}",
        "agents",
        "Removes the directives of one operation.",
        {JSON: ref("AgentDirectives")},
        WRITES,
        parameters=(AGENT, Parameter("operation", "path", OPERATION_ID.schema(), "Its name.")),
    ),
    Described(
        "POST",
        "/v1/agents/{agent}/rebuild",
        "agents",
        "Makes the next turn recompute what was kept after edits.",
        {JSON: ref("AgentRebuild")},
        WRITES,
        parameters=(AGENT,),
    ),
    _verb("decay", "Evicts it before others once it has been idle for this long.", DECAY_BODY),
    Described(
        "DELETE",
        "/v1/agents/{agent}/decay",
        "agents",
        "Undoes a decay.",
        {JSON: ref("AgentWishes")},
        WRITES,
        parameters=(AGENT,),
    ),
    _verb("close", "Drops its hot cache and its pin; it is evicted first.", None),
    _verb(
        "share",
        "Sets whether other agents of the tenant may reuse its cache.",
        SHARE_BODY,
    ),
    _verb("evict", "Drops its hot cache, or a copy on another node's disk.", EVICT_BODY),
    _verb(
        "supersede",
        "Replaces an earlier message by a reference to the later one.",
        SUPERSEDE_BODY,
        "AgentDirectives",
    ),
)
