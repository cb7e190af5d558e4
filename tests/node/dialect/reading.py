"""Read an answer's text as a family writes it, whole or in pieces."""

import json
from dataclasses import dataclass, field
from itertools import pairwise

from node.dialect.answer_delta import AnswerDelta
from node.dialect.format_selection import FallbackFormats, FormatSettings, select_format
from node.dialect.marked_reader import MarkedReader


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("look", at={"type": "string"}),
    tool("bash", command={"type": "string"}, timeout={"type": "integer"}),
    tool("now"),
]


@dataclass
class Read:
    """Everything that a client was shown."""

    text: str = ""
    reasoning: str = ""
    calls: list = field(default_factory=list)  # of names and arguments
    begun: list = field(default_factory=list)  # broken calls: names and the text of arguments
    ids: list = field(default_factory=list)
    parts: dict = field(default_factory=dict)  # streamed text of each call, by id
    broken: int = 0
    stopped_by: str | None = None


def marked(calls="auto", thoughts="auto", template="", vocabulary=()):
    return select_format(template, vocabulary, FormatSettings(calls, thoughts), FallbackFormats())


def marked_reader(family, tail="", stop=(), tools=TOOLS):
    reader = MarkedReader(family, stop, tools, "operation-1")
    reader.begin(tail)
    return reader


def read(reader, pieces, *, is_cut=False):
    result = Read()
    for piece in pieces:
        add(result, reader.feed(piece))
    if result.stopped_by is None:
        add(result, reader.finish(is_cut=is_cut))
    result.broken = reader.broken_calls
    assert reader.has_calls == bool(result.calls or result.begun)
    assert len(result.parts) == len(result.ids), "every streamed call is also reported whole"
    return result


def add(result: Read, shown: AnswerDelta) -> None:
    result.text += shown.text
    result.reasoning += shown.reasoning
    for part in shown.call_deltas:
        name, arguments = result.parts.get(part.id, ("", ""))
        result.parts[part.id] = (name + part.name, arguments + part.arguments)
    for call in shown.calls:
        if call.is_broken:
            result.begun.append((call.name, call.arguments))
        else:
            result.calls.append((call.name, json.loads(call.arguments)))
        result.ids.append(call.id)
        assert result.parts[call.id] == (call.name, call.arguments), "streamed as one"
    result.stopped_by = shown.stopped_by or result.stopped_by


def cut(text, places):
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]
