"""The routes of directives, as the OpenAPI document has them."""

from typing import Any, Final

from fabric.limits import (
    AGENT_TOKENS_MAX,
    DECAY_S_MAX,
    DIRECTED_ID_CHARS_MAX,
    DIRECTED_TEXT_CHARS_MAX,
    DIRECTIVE_BYTES_MAX,
    DIRECTIVES_MAX,
    MESSAGES_MAX,
)
from router.admin.generate_description import AGENT
from router.api.description import (
    AGENT_ID,
    FLAG,
    JSON,
    NAMED,
    WRITES,
    Described,
    Parameter,
    answer,
    array,
    body,
    integer,
    nullable,
    number,
    one_of,
    ref,
    text,
    with_rare,
)

_PATH: Final = "/v1/agents/{agent}/directives"
OPERATION: Final = "^[A-Za-z0-9_-]{8,64}$"
_MODE: Final = one_of("exact", "forget", "amortize")
_REPLACEMENT: Final = text(maxLength=DIRECTIVE_BYTES_MAX // 4)
_NUMBER: Final = integer(0, MESSAGES_MAX - 1)
_TOKEN: Final = integer(0, AGENT_TOKENS_MAX)
_CHARS: Final = {"start": integer(0), "end": integer(1)}
_SAID: Final = body({"role": one_of("user", "assistant", "tool"), "content": text()})
_SOUGHT: Final = text(minLength=1, maxLength=DIRECTED_TEXT_CHARS_MAX)


def _place(required: dict[str, Any], **more: Any) -> dict[str, Any]:
    return body(required, replacement=nullable(_REPLACEMENT), mode=_MODE, **more)


_DIRECTIVE: Final = {
    "anyOf": [
        body(
            {"tool_call_id": text(minLength=1, maxLength=DIRECTED_ID_CHARS_MAX)},
            replacement=_REPLACEMENT,
            mode=_MODE,
            part=one_of("result", "arguments"),
        ),
        _place({"message": _SAID}, **_CHARS),
        _place({"message": _NUMBER}, **_CHARS),
        _place({"messages": body({"first": _NUMBER, "last": _NUMBER})}),
        _place({"text": _SOUGHT}, message=_NUMBER, every=FLAG),
        _place({"start_token": _TOKEN, "end_token": _TOKEN}),
    ]
}
_DIRECTIVES: Final = array(
    answer(
        operation=text(),
        mode=one_of("forget", "amortize"),
        replacement_chars=nullable(integer()),
        result_of=nullable(text()),
        made_s=number(),
        is_applied=FLAG,
        message=nullable(integer()),
        start=nullable(integer()),
        end=nullable(integer()),
        part=nullable(one_of("arguments", "besides_text")),
        dropped_chars=nullable(integer()),
        dropped_digest=nullable(text()),
        made_by=nullable(text()),
        holds_for=array(one_of("chats", "generate")),
        undone_s=nullable(number()),
    )
)
_MESSAGES: Final = array(
    answer(
        number=integer(),
        role=one_of("system", "user", "assistant", "tool"),
        chars=integer(),
        start_token=nullable(integer()),
        end_token=nullable(integer()),
        is_edited=FLAG,
    )
)
_WISHES: Final = {
    "rebuilds": FLAG,
    "closed": FLAG,
    "decays_after_s": nullable(number()),
    "share": one_of("tenant", "agent"),
}
OF_AN_AGENT: Final[dict[str, dict[str, Any]]] = {
    "amortized": FLAG,
    "exact_tokens": nullable(integer()),
    "edits": array(
        with_rare(
            answer(
                made_s=number(),
                start=integer(),
                dropped_tokens=integer(),
                inserted_tokens=integer(),
                moved_tokens=integer(),
                dropped_digest=text(),
            ),
            is_borrowed=FLAG,
        )
    ),
    "directives": _DIRECTIVES,
    **_WISHES,
}
SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "AgentDirectives": answer(
        id=AGENT_ID,
        object=one_of("agent.directives"),
        node=text(),
        operation=nullable(text()),
        directives=_DIRECTIVES,
    ),
    "AgentMemory": answer(
        id=AGENT_ID,
        object=one_of("agent.memory"),
        node=text(),
        tokens=integer(),
        messages=_MESSAGES,
        directives=_DIRECTIVES,
        undone=_DIRECTIVES,
    ),
    "AgentWishes": answer(
        id=AGENT_ID,
        object=one_of("agent.wishes"),
        node=text(),
        tiers=array(text()),
        pinned=FLAG,
        **_WISHES,
    ),
    "AgentRebuild": answer(
        id=AGENT_ID,
        object=one_of("agent.rebuild"),
        node=text(),
        rebuilds=FLAG,
        exact_tokens=nullable(integer()),
    ),
}
_DECAYS: Final = body({}, after_s=number(0, DECAY_S_MAX))
_SHARES: Final = body({"scope": one_of("tenant", "agent")})
_EVICTS: Final = body({}, node=text(), **{"from": one_of("memory", "disk")})
_MESSAGE: Final = {
    "anyOf": [
        body({"tool_call_id": text(minLength=1, maxLength=DIRECTED_ID_CHARS_MAX)}),
        body({"message": _NUMBER}),
    ]
}


def _wish(
    verb: str, does: str, asked: dict[str, Any] | None, shape: str = "AgentWishes"
) -> Described:
    path = f"/v1/agents/{{agent}}/{verb}"
    needs = verb in ("share", "supersede")
    return Described(
        "POST", path, "agents", does, {JSON: ref(shape)}, WRITES, body=asked,
        needs_body=needs, parameters=(AGENT,),
    )  # fmt: skip


DESCRIBED: Final = (
    Described(
        "GET",
        _PATH,
        "agents",
        "Lists the messages that can be named, the directives that hold, and those undone.",
        {JSON: ref("AgentMemory")},
        NAMED,
        parameters=(AGENT,),
    ),
    Described(
        "POST",
        _PATH,
        "agents",
        "Lets messages of its history read otherwise from now on, all or none.",
        {JSON: ref("AgentDirectives")},
        WRITES,
        body=body(
            {"directives": array(_DIRECTIVE, DIRECTIVES_MAX, 1)},
            operation=text(pattern=OPERATION),
        ),
        parameters=(AGENT,),
    ),
    Described(
        "DELETE",
        _PATH,
        "agents",
        "Takes all directives back.",
        {JSON: ref("AgentDirectives")},
        WRITES,
        parameters=(AGENT,),
    ),
    Described(
        "DELETE",
        f"{_PATH}/{{operation}}",
        "agents",
        "Takes back what one operation said.",
        {JSON: ref("AgentDirectives")},
        WRITES,
        parameters=(AGENT, Parameter("operation", "path", text(pattern=OPERATION), "Its name.")),
    ),
    Described(
        "POST",
        "/v1/agents/{agent}/rebuild",
        "agents",
        "Lets its next turn compute anew what was kept behind edits.",
        {JSON: ref("AgentRebuild")},
        WRITES,
        parameters=(AGENT,),
    ),
    _wish("decay", "Lets it be evicted before others once it is idle for so long.", _DECAYS),
    Described(
        "DELETE",
        "/v1/agents/{agent}/decay",
        "agents",
        "Lets it be worth again what it was.",
        {JSON: ref("AgentWishes")},
        WRITES,
        parameters=(AGENT,),
    ),
    _wish("close", "Lets go of its hot memory and its pin; it is evicted first.", None),
    _wish("share", "Says whether other agents of the tenant may begin with its memory.", _SHARES),
    _wish("evict", "Lets go of its hot memory, or of a copy on another node's disk.", _EVICTS),
    _wish(
        "supersede",
        "Lets an earlier message give way to a word that names the later one.",
        body(
            {"earlier": _MESSAGE, "later": _MESSAGE},
            mode=_MODE,
            operation=text(pattern=OPERATION),
        ),
        "AgentDirectives",
    ),
)
