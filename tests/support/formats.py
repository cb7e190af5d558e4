"""Output formats for tests: every kind and size, and hostile ones."""

import json
import random
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load

from fabric.turn.answer_constraints import OutputFormat, OutputKind
from node.grammar.compiler import Compiler, TokenizerFacts
from node.mlx.chat_tokenizer import ChatTokenizer

PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["city", "river"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}


def schema(value: Any, *, is_strict: bool = True) -> OutputFormat:
    """Return an output format for this JSON schema."""
    return OutputFormat(OutputKind.JSON_SCHEMA, json.dumps(value), is_strict)


def regex(pattern: str) -> OutputFormat:
    """Return an output format for this regular expression."""
    return OutputFormat(OutputKind.REGEX, pattern)


def lark(grammar: str) -> OutputFormat:
    """Return an output format for this grammar."""
    return OutputFormat(OutputKind.GRAMMAR, grammar)


def choice(*texts: str) -> OutputFormat:
    """Return an output format that allows only these texts."""
    return OutputFormat(OutputKind.CHOICE, json.dumps(texts))


def tokenizer_in(folder: Path) -> ChatTokenizer:
    """Load a tokenizer."""
    return ChatTokenizer(load(folder))


def compiler_of(tokenizer: ChatTokenizer, vocabulary_size: int) -> Compiler:
    """Return a compiler for a tokenizer."""

    def facts() -> TokenizerFacts:
        ids = tokenizer.added_ids
        return TokenizerFacts(tokenizer.definition, vocabulary_size, tokenizer.eos_ids, ids)

    return Compiler(facts)


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema of short values, so that a model with random weights completes them."""
    kinds = [_text, _number, _constant, _texts]
    if depth:
        kinds += [_object, _object, _array, _union]
    return rng.choice(kinds)(rng, depth - 1)


def _text(rng: random.Random, _depth: int) -> dict[str, Any]:
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randrange(1, 9)},
            {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]+$", "maxLength": 9},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "ipv4"},
        ]
    )


def _number(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    bounds = {"minimum": low, "maximum": low + rng.randrange(1, 200)}
    return rng.choice([{"type": "integer", **bounds}, {"type": ["boolean", "null"]}])


def _constant(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["größer", 12, None, True, [1, "a"], {"a": 1}, 'a "b" \\ \n'])}


def _texts(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", "blue", "", "red wine", 3, False], 3)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["id", "name", "größe", "the cat", "x-y", 'q"t'], rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    few = rng.randrange(3)
    return {
        "type": "array",
        "items": random_schema(rng, depth),
        "minItems": few,
        "maxItems": few + rng.randrange(3),
    }


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth) for _ in range(2)]}


def _nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value}}
    return value


def _doubled(levels: int) -> str:
    rules = [f"r{n}: r{n + 1} r{n + 1}" for n in range(levels)]
    return "\n".join(["start: r0", *rules, f'r{levels}: "a"'])


# It compiles, and exceeds the limits a few tokens later.
TOO_COMPLEX = lark('start: /[b-d]{8}/ "a"{1000000}')

# Each is refused at once: compiling any of them would take seconds or more.
HOSTILE = {
    "nested objects": schema(_nested(100)),
    "thousands of properties": schema({"properties": {f"p{n}": {} for n in range(2_500)}}),
    "thousands of patterns": schema({"patternProperties": {f"^k{n}": {} for n in range(1_000)}}),
    "thousands of options": schema({"anyOf": [{"$ref": "#"}] * 2_000}),
    "a huge enum": schema({"enum": [f"value {n}" for n in range(5_000)]}),
    "a huge constant": schema({"const": "x" * 60_000}),
    "megabytes": schema({"description": "x" * (1 << 21)}),
    "a schema that is itself": schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "a schema from elsewhere": schema({"$ref": "http://example.org/schema"}),
    "nothing fits": schema({"allOf": [{"type": "string"}, {"type": "number"}]}),
    "false": schema(False),
    "no type": schema({"type": "nonsense"}),
    "looking around": schema({"type": "string", "pattern": "^(?!a)b"}),
    "patterns at once": schema(
        {"allOf": [{"type": "string", "pattern": f".*{c}.{{10}}"} for c in "abcdefghijkl"]}
    ),
    "a long regex": regex("[a-z]*" * 8_000),
    "deep brackets": regex("(" * 4_000 + "a" + ")" * 4_000),
    "an open bracket": regex("(a"),
    "deep brackets of rules": lark("start: " + "(" * 3_000 + '"a"' + ")" * 3_000),
    "rules that double": lark(_doubled(40)),
    "a million letters": lark('start: "a"{1000000}'),
    "and, not": lark("start: A\nA: /.*a.{12}/ & ~/.*b.{12}/ & /.*c.{12}/"),
    "an unknown rule": lark("start: b"),
    "no grammar": lark("}{"),
}
