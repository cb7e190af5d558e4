"""Hypothesis strategies of bodies that the turn routes accept, and of small changes to them.

Most bodies made from the routes' schemas alone are refused, so that little code behind the parsers
is reached. These bodies have consistent roles, calls with results, tools with schemas, and fields
within their limits. `changed` replaces, removes or adds one or two values in some of them.
"""

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, Final

from hypothesis import strategies as st

MARKS: Final = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
WORDS: Final = ("", " ", "hello", "Ünïcødé 漢字 🦦", "a\r\nb\u2028c\x00", "{}", "x" * 3_000, *MARKS)
NAMES: Final = ("look", "read_file", "mcp__web__search", "shell", "a-b")
SHARE_CHANGED: Final = 0.5
_ODD_NUMBERS: Final = (-1, 0, 1, 64.0, 0.5, 2**31, 2**63, 2**70, -(2**70), 1e308, 5e-324)
_ODD: Final = (None, True, False, "", "true", "7", "0.5", [], {}, [[]], [None], {"": {}}, "\ud800")

words = st.one_of(
    st.sampled_from(WORDS),
    st.text(max_size=40),
    st.lists(st.sampled_from(WORDS), max_size=4).map("".join),
)
names = st.sampled_from(NAMES)
junk = st.one_of(
    st.sampled_from(_ODD),
    st.sampled_from(_ODD_NUMBERS),
    words,
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=9)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=9), inner, max_size=4)
        ),
        max_leaves=8,
    ),
)

_SCALARS: Final = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "enum": ["north", "south"]},
        {"type": "string", "pattern": "^[a-z]{1,4}$"},
        {"type": "string", "format": "date", "description": "a day"},
        {"type": "integer", "minimum": 0, "maximum": 9},
        {"type": ["number", "null"]},
        {"type": "boolean", "default": False},
        {"const": 7},
        {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    ]
)
_PROPERTY_NAMES: Final = st.sampled_from(["path", "query", "count", "line end", "größe"])


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(_PROPERTY_NAMES, inner, max_size=3)

    def schema(drawn: tuple[dict[str, Any], bool, bool]) -> dict[str, Any]:
        known, all_required, is_closed = drawn
        more: dict[str, Any] = {"required": sorted(known)} if all_required else {}
        return {"type": "object", "properties": known, **more} | (
            {"additionalProperties": False} if is_closed else {}
        )

    return st.tuples(properties, st.booleans(), st.booleans()).map(schema)


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return inner.map(lambda items: {"type": "array", "items": items, "maxItems": 3})


object_schemas = _objects(
    st.recursive(_SCALARS, lambda inner: st.one_of(_arrays(inner), _objects(inner)), max_leaves=5)
)
loose_schemas = st.one_of(
    object_schemas,
    object_schemas,
    st.sampled_from([None, {}, {"type": "object"}, {"properties": None}]),
)


def _some(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Give up to four of these fields; with more, one of them is nearly always refused."""
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)
    return chosen.flatmap(
        lambda chosen_names: st.fixed_dictionaries({name: fields[name] for name in chosen_names})
    )


def _numbers(low: float, high: float) -> st.SearchStrategy[Any]:
    return st.one_of(st.sampled_from([low, high]), st.floats(low, high))


SAMPLING: Final = {
    "temperature": st.one_of(_numbers(0, 2), st.sampled_from(["0.7", None])),
    "top_p": _numbers(0.01, 1),
    "top_k": st.sampled_from([-1, 0, 1, 40, 10**6]),
    "min_p": _numbers(0, 1),
    "seed": st.one_of(st.integers(-(2**63), 2**64 - 1), st.just("12")),
    "stop": st.one_of(words, st.lists(words.map(lambda text: text[:512]), max_size=4)).map(
        lambda stop: stop[:512] if isinstance(stop, str) else stop
    ),
    "logit_bias": st.dictionaries(
        st.integers(0, 250).map(str), st.one_of(st.none(), _numbers(-100, 100)), max_size=4
    ),
    "repetition_penalty": _numbers(0.01, 10),
    "frequency_penalty": _numbers(-2, 2),
    "presence_penalty": _numbers(-2, 2),
    "ignore_eos": st.booleans(),
    "thinking_budget": st.sampled_from([-1, 0, 1, 5, "3", 10**9]),
    "user": st.sampled_from(["mira", "ivan", "somebody"]),
    "prompt_cache_key": st.sampled_from(["mira", "key"]),
    "prompt_cache_retention": st.sampled_from(["24h", "in_memory"]),
    "service_tier": st.sampled_from(["auto", "flex", "priority"]),
    "metadata": st.sampled_from([{}, {"agent_id": "mira"}, {"topic": "lamps", "n": "1"}]),
    "chat_template_kwargs": st.sampled_from(
        [{}, {"enable_thinking": False}, {"move_dates": True}, {"restore_reasoning": False}]
    ),
    "macfabric": st.sampled_from(
        [{"truncation": "auto"}, {"edits": "amortize"}, {"edits": "anywhere"}, {"policies": []}]
    ),
    "unknown_field": junk,
}
TOOL_FIELDS: Final = {"parallel_tool_calls": st.booleans()}
_PICTURE: Final = "data:image/png;base64,iVBORw0KGgo="


def _formats() -> st.SearchStrategy[Any]:
    named = st.builds(
        lambda schema, strict: {"name": "answer", "schema": schema, "strict": strict},
        object_schemas,
        st.booleans(),
    )
    return st.one_of(
        st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
        named.map(lambda named_schema: {"type": "json_schema", "json_schema": named_schema}),
    )


def _flat_format(chat_format: dict[str, Any]) -> dict[str, Any]:
    """Write a chat's format as the Responses API does."""
    return {"type": chat_format["type"], **chat_format.get("json_schema", {})}


def _functions() -> st.SearchStrategy[list[dict[str, Any]]]:
    function = st.fixed_dictionaries(
        {"name": names},
        optional={"description": words, "parameters": loose_schemas, "strict": st.booleans()},
    )
    return st.lists(function, max_size=3, unique_by=lambda each: each["name"])


@st.composite
def _turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw a conversation in no dialect: texts, and calls with their results."""
    turns: list[dict[str, Any]] = []
    if draw(st.booleans()):
        turns.append({"role": "system", "text": draw(words)})
    for index in range(draw(st.integers(1, 4))):
        if index:
            turns += draw(_answers(index))
        turns.append({"role": "user", "text": draw(words), "other": draw(st.integers(0, 9))})
    if draw(st.integers(0, 4)) == 0:
        turns += draw(_answers(9, must_call=True))
    return turns


@st.composite
def _answers(draw: st.DrawFn, index: int, *, must_call: bool = False) -> list[dict[str, Any]]:
    """Draw an answer, with the results of its calls."""
    calls = [
        {
            "id": f"call_{index}_{number}",
            "name": draw(names),
            "input": draw(st.dictionaries(_PROPERTY_NAMES, junk.filter(_is_sent), max_size=2)),
        }
        for number in range(draw(st.integers(1 if must_call else 0, 2)))
    ]
    thought = draw(st.one_of(st.none(), words))
    answer = {"role": "assistant", "text": draw(words), "calls": calls, "thought": thought}
    results = [
        {"role": "tool", "call": call, "text": draw(words), "other": draw(st.integers(0, 9))}
        for call in calls
    ]
    return [answer, *results]


def _is_sent(value: Any) -> bool:
    """Return whether JSON in UTF-8 can hold a value."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, UnicodeEncodeError):
        return False
    return True


@st.composite
def chats(draw: st.DrawFn, model: str) -> dict[str, Any]:
    """Draw a body of POST /v1/chat/completions."""
    messages = [_chat_message(turn) for turn in draw(_turns())]
    body = {"model": model, "messages": messages, "max_tokens": draw(st.integers(1, 9))}
    functions = draw(_functions())
    if functions:
        tools: list[dict[str, Any]] = [{"type": "function", "function": f} for f in functions]
        if draw(st.integers(0, 4)) == 0:
            tools.append({"type": "web_search_preview"})
        body["tools"] = tools
        chosen = {"type": "function", "function": {"name": functions[0]["name"]}}
        choices = st.sampled_from(["auto", "auto", "none", "required", chosen])
        body |= draw(_some({**TOOL_FIELDS, "tool_choice": choices}))
    more = {
        "response_format": _formats(),
        "n": st.sampled_from([1, 2, 3]),
        "reasoning_effort": st.sampled_from(["none", "low", "high"]),
        "max_completion_tokens": st.sampled_from([1, 7, 64.0, 200_000, -1]),
    }
    body |= draw(_some({**SAMPLING, **more}))
    if draw(st.integers(0, 5)) == 0:
        body |= {"logprobs": True, "top_logprobs": draw(st.integers(0, 20))}
    if draw(st.integers(0, 2)) == 0:
        body |= {"stream": True, "stream_options": {"include_usage": draw(st.booleans())}}
    return body


def _chat_message(turn: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "text", "text": turn["text"]}
    picture = {"type": "image_url", "image_url": {"url": _PICTURE}}
    content = [text, picture] if turn.get("other") == 0 else turn["text"]
    if turn["role"] == "tool":
        return {"role": "tool", "tool_call_id": turn["call"]["id"], "content": content}
    message = {"role": turn["role"], "content": content}
    if turn.get("thought") is not None:
        message["reasoning_content"] = turn["thought"]
    if turn.get("calls"):
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["input"])},
            }
            for call in turn["calls"]
        ]
    return message


@st.composite
def messages(draw: st.DrawFn, model: str) -> dict[str, Any]:
    """Draw a body of POST /v1/messages."""
    turns = draw(_turns())
    body: dict[str, Any] = {"model": model, "max_tokens": draw(st.integers(0, 9))}
    if turns[0]["role"] == "system":
        body["system"] = turns.pop(0)["text"]
    body["messages"] = [_messages_message(turn) for turn in turns]
    functions = draw(_functions())
    if functions:
        body["tools"] = [
            {
                "name": each["name"],
                "input_schema": each.get("parameters") or {"type": "object"},
                **{name: each[name] for name in ("description", "strict") if name in each},
            }
            for each in functions
        ]
        if draw(st.integers(0, 4)) == 0:
            body["tools"].append({"type": "web_search_20250305", "name": "web_search"})
        chosen = {"type": "tool", "name": functions[0]["name"]}
        kinds = [{"type": kind} for kind in ("auto", "auto", "none", "any")]
        body |= draw(_some({"tool_choice": st.sampled_from([*kinds, chosen])}))
    formats = object_schemas.map(lambda drawn: {"type": "json_schema", "schema": drawn})
    more = {
        "temperature": _numbers(0, 1),
        "top_p": _numbers(0.01, 1),
        "top_k": st.sampled_from([0, 1, 40]),
        "stop_sequences": st.lists(words.map(lambda text: text[:512] or "."), max_size=4),
        "stream": st.booleans(),
        "thinking": st.sampled_from(
            [
                {"type": "enabled", "budget_tokens": 1_024},
                {"type": "disabled"},
                {"type": "adaptive"},
            ]
        ),
        "output_config": st.one_of(
            st.just({"effort": "low"}), formats.map(lambda drawn: {"format": drawn})
        ),
        "metadata": st.sampled_from([{"user_id": "mira"}, {"user_id": '{"session_id": "s"}'}]),
        "cache_control": st.just({"type": "ephemeral", "ttl": "1h"}),
        "context_management": st.sampled_from(
            [
                {"edits": []},
                {"edits": [{"type": "clear_thinking_20251015"}]},
                {"edits": [{"type": "clear_tool_uses_20250919"}]},
            ]
        ),
        "service_tier": st.just("auto"),
        "macfabric": SAMPLING["macfabric"],
        "unknown_field": junk,
    }
    return body | draw(_some(more))


def _messages_message(turn: dict[str, Any]) -> dict[str, Any]:
    picture = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
    }
    text = {"type": "text", "text": turn["text"]}
    blocks = [text, picture] if turn.get("other") == 0 else turn["text"]
    if turn["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": turn["call"]["id"], "content": blocks}
        return {"role": "user", "content": [result]}
    if turn["role"] == "user":
        return {"role": "user", "content": blocks}
    content: list[dict[str, Any]] = []
    if turn["thought"] is not None:
        content.append({"type": "thinking", "thinking": turn["thought"], "signature": "s"})
    if turn["text"] or not turn["calls"]:
        content.append(text)
    content += [{"type": "tool_use", **call} for call in turn["calls"]]
    return {"role": "assistant", "content": content}


@st.composite
def responses(draw: st.DrawFn, model: str) -> dict[str, Any]:
    """Draw a body of POST /v1/responses."""
    turns = draw(_turns())
    body: dict[str, Any] = {"model": model, "max_output_tokens": draw(st.integers(1, 9))}
    if turns[0]["role"] == "system" and draw(st.booleans()):
        body["instructions"] = turns.pop(0)["text"]
    items = [item for turn in turns for item in _response_items(turn)]
    body["input"] = draw(words) if draw(st.integers(0, 5)) == 0 else items
    functions = draw(_functions())
    if functions:
        body["tools"] = [{"type": "function", **each} for each in functions]
        if draw(st.integers(0, 4)) == 0:
            body["tools"].append({"type": "web_search"})
        chosen = {"type": "function", "name": functions[0]["name"]}
        choices = st.sampled_from(["auto", "auto", "none", "required", chosen])
        body |= draw(_some({**TOOL_FIELDS, "tool_choice": choices}))
    more = {
        "stream": st.booleans(),
        "store": st.booleans(),
        "truncation": st.sampled_from(["auto", "disabled"]),
        "include": st.sampled_from([[], ["reasoning.encrypted_content"]]),
        "reasoning": st.sampled_from(
            [{"effort": "low"}, {"effort": "none"}, {"summary": "auto"}, {"max_tokens": 3}]
        ),
        "text": _formats().map(lambda chat_format: {"format": _flat_format(chat_format)}),
        "top_logprobs": st.integers(0, 20),
    }
    return body | draw(_some({**SAMPLING, **more}))


def _response_items(turn: dict[str, Any]) -> list[dict[str, Any]]:
    if turn["role"] == "tool":
        output = {"type": "function_call_output", "call_id": turn["call"]["id"]}
        return [{**output, "output": turn["text"]}]
    kind = "output_text" if turn["role"] == "assistant" else "input_text"
    content: list[dict[str, Any]] = [{"type": kind, "text": turn["text"]}]
    if turn.get("other") == 0:
        content.append({"type": "input_image", "image_url": _PICTURE})
    items: list[dict[str, Any]] = []
    if turn.get("thought") is not None:
        thought = {"type": "reasoning_text", "text": turn["thought"]}
        items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]})
    items.append({"type": "message", "role": turn["role"], "content": content})
    items += [
        {
            "type": "function_call",
            "call_id": call["id"],
            "name": call["name"],
            "arguments": json.dumps(call["input"]),
        }
        for call in turn.get("calls", ())
    ]
    return items


@st.composite
def changed(draw: st.DrawFn, bodies: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    """Draw a body; in half of them, replace, remove, add or repeat one or two values.

    A generator seeded by the draw chooses, since draws themselves prefer first and small values.
    """
    body = deepcopy(draw(bodies))
    choose = random.Random(draw(st.integers(0, 2**32 - 1)))
    if choose.random() >= SHARE_CHANGED:
        return body
    for _ in range(choose.choice((1, 1, 2))):
        places = [place for place in _places(body) if choose.random() < _weight(place)]
        if places:
            holder, key = choose.choice(places)
            _change(holder, key, choose, draw(junk))
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every object and array with each of its keys."""
    if not isinstance(value, (dict, list)):
        return
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        yield from _places(value[key])


def _weight(place: tuple[Any, Any]) -> float:
    """Give most model names and message lists a low weight: without them, every body is refused."""
    return 0.1 if place[1] in ("model", "messages", "input") else 1.0


def _change(holder: Any, key: Any, choose: random.Random, new: Any) -> None:
    how = choose.choice(("replace", "remove", "add", "repeat"))
    if how == "remove":
        del holder[key]
    elif how == "replace":
        holder[key] = new
    elif isinstance(holder, list):
        holder.insert(key, deepcopy(holder[key]) if how == "repeat" else new)
    elif how == "repeat":
        holder[key] = [deepcopy(holder[key]), deepcopy(holder[key])]
    else:
        holder[choose.choice(("type", "name", "content", "strict", "x"))] = new
