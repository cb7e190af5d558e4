"""The scripted model's answers to the clients' questions, and a fabric that serves it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric.turn.answer_constraints import OutputKind
from fabric.turn.generation import GenerateRequest
from fabric.turn.messages import Message, MessageRole
from tests.clients.shapes import FAMILIES
from tests.support.local_fabric import LocalFabric, local_fabric
from tests.support.obedient_model import Answers, ObedientModel, english, obedient
from tests.support.template_shapes import ScriptedAnswer, write_shape

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = "Count without an end."
GREETING = "Hello from the fabric, to everybody who came."
ENDLESS_WORDS = 20_000
KNOWN = {"city": "Paris", "people": 7, "command": "echo fabric-$((40+2)) | tee said"}
KNOWN |= {"cmd": KNOWN["command"], "is_background": False}
CITY = {"city": "Paris", "people": 7}
SIMPLE = {"string": "some text", "integer": 7, "number": 7.5, "boolean": True, "null": None}
OBSERVED = "sunny in Paris"
WEATHER = "What is the weather in Paris?"
SHELL = "What does the shell say?"
SHELLS = ("Bash", "bash", "shell", "exec_command", "run_shell_command")
LAST_CALLS = ("final_answer", "final_result")  # tools by which some frameworks receive the answer
TOKENS_OF_TEXT = 4_000


@dataclass(frozen=True)
class Obeying:
    """A fabric and its scripted model."""

    fabric: LocalFabric
    model: ObedientModel


@contextmanager
def obeying(
    folder: Path,
    family: str = "a thought that the prompt opens",
    *,
    answers: Answers | None = None,
    context_tokens: int = 131_072,
    **settings: Any,
) -> Iterator[Obeying]:
    """Serve a model that answers by `answers`, by default `answer`; `settings` are the fabric's."""
    shape, weights = FAMILIES[family]
    path = write_shape(
        folder / "scripted",
        shape,
        weights,
        english(ROOT),
        vocab_size=TOKENS_OF_TEXT,
        max_position_embeddings=context_tokens,
    )
    with (
        obedient(shape, answers or answer) as model,
        local_fabric(folder, str(path), "only", **settings) as fabric,
    ):
        yield Obeying(fabric, model)


def answer(request: GenerateRequest) -> ScriptedAnswer:
    """Follow the request: call the tool, fill in the format, or report the tool's result."""
    messages = request.messages or ()
    last_user = max((i for i, m in enumerate(messages) if m.role is MessageRole.USER), default=0)
    question = _text(messages[last_user]) if messages else ""
    results = [_text(m) for m in messages[last_user:] if m.role is MessageRole.TOOL]
    if OBSERVED in question:  # some clients send results as user messages
        results = [OBSERVED]
    reply = f"It says: {results[-1]}" if results else GREETING
    if request.continues:
        return ScriptedAnswer(GREETING.removeprefix(_text(messages[-1])))
    call = _call(request, question, reply, has_results=bool(results))
    if call is not None:
        return ScriptedAnswer("", "A tool knows.", call)
    output = request.sampling.output
    if output is not None and output.kind is OutputKind.JSON_SCHEMA:
        return ScriptedAnswer(
            json.dumps(instance(json.loads(output.source))), "The format is clear."
        )
    if "Answer in the format." in question or output is not None:  # in words, or any object
        return ScriptedAnswer(json.dumps(CITY), "They want JSON.")
    if ENDLESS in question:
        return ScriptedAnswer(" ".join(map(str, range(ENDLESS_WORDS))), "It does not end.")
    return ScriptedAnswer(reply, "Somebody is here.")


def _call(
    request: GenerateRequest, question: str, reply: str, *, has_results: bool
) -> tuple[str, dict[str, Any]] | None:
    """Choose the tool that the question or the client requires, if any."""
    tools = {tool["function"]["name"]: tool["function"] for tool in request.tools or []}
    last = next((name for name in LAST_CALLS if name in tools), None)
    wanted = next((name for name in tools if _is_wanted(name, question)), None)
    name = last if has_results or wanted is None else wanted
    if request.calls.must_call and name is None:
        names = [each for each in request.calls.names or tools if each != wanted]
        name = (names or [wanted])[0]
    return None if name is None else (name, _arguments(tools[name], reply))


def _text(message: Message) -> str:
    return "".join(message.texts)


def _is_wanted(name: str, question: str) -> bool:
    if name in SHELLS:
        return SHELL in question
    if name.startswith("transfer_to"):
        return "transfer me" in question
    return "weather" in name.lower() and WEATHER in question


def _arguments(function: dict[str, Any], reply: str) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object"}
    needed = {name: schema["properties"][name] for name in schema.get("required", ())}
    arguments = instance({**schema, "properties": needed})
    return arguments | {"answer": reply} if "answer" in arguments else arguments


def instance(schema: Any, name: str = "", root: Any = None) -> Any:
    """Return a value that fits a schema, using known values of names."""
    root = schema if root is None else root
    if "$ref" in schema:
        return instance(_referred(schema["$ref"], root), name, root)
    for word in ("anyOf", "oneOf", "allOf", "enum"):
        if word in schema:
            first = schema[word][0]
            return first if word == "enum" else instance(first, name, root)
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if kind == "object":
        properties = schema.get("properties", {})
        return {key: instance(value, key, root) for key, value in properties.items()}
    if kind == "array":
        return [instance(schema.get("items", {"type": "string"}), name, root)]
    return KNOWN.get(name, SIMPLE[kind])


def _referred(reference: str, root: Any) -> Any:
    for part in reference.removeprefix("#/").split("/"):
        root = root[part]
    return root
