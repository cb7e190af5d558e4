"""Texts that a call grammar accepts are read as calls that fit their tools."""

import random
import re
from dataclasses import dataclass, replace

import jsonschema
import pytest

from fabric.errors import RejectedError
from fabric.turn.answer_constraints import CallChoice, ToolText
from node.dialect.call_grammar import GrammarOptions
from node.dialect.families.gpt_oss import FAMILY as GPT_OSS
from node.dialect.format_selection import CALL_FORMATS
from node.dialect.formats import AnswerFormat
from node.dialect.harmony import MARKS, HarmonyReader
from node.dialect.marked_reader import MarkedReader
from node.dialect.tool_schema import callable_tools
from node.mlx.upstream_formats import parser_named
from router.openai.lark_pattern import lark_rules
from tests.node.dialect.reading import cut, marked, read
from tests.support.random_walk import walker
from tests.support.samples import sample

MARKED = {
    "json": ("<tool_call>", "</tool_call>"),
    "phi4": ("<|tool_call|>", "<|/tool_call|>"),
    "granite": ("<|tool_call|>",),
    "command": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
    "glm": (
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax_m3": ("]<]minimax[>[",),
    "deepseek_v32": ("｜DSML｜",),
    "deepseek_v4": ("｜DSML｜",),
    "deepseek_v41": ("｜DSML｜",),
    "kimi_k2": (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    ),
    "deepseek": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "llama": ("<|python_tag|>",),
    "llama4": ("<|python_start|>",),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "harmony": MARKS,
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "minicpm5": ("<function", "</function>", "<param", "</param>"),
}
RESPONSE = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
UPSTREAM = ("pythonic",)  # read by mlx-lm, whose marks count only as special tokens


@dataclass(frozen=True)
class Case:
    """A format, as a model with these tokens and this template writes it."""

    name: str
    specials: tuple[str, ...] = ()
    template: str = ""

    def __str__(self) -> str:
        return f"{self.name} {len(self.specials)} {self.template}".strip()


CASES = [
    *(Case(name, MARKED.get(name, ())) for name in [*CALL_FORMATS, "harmony", *UPSTREAM]),
    *(Case(name) for name in MARKED if name not in ("harmony", "llama", "llama4", *UPSTREAM)),
    Case("mistral", ("[TOOL_CALLS]",)),
    Case("mistral", MARKED["mistral"], "[CALL_ID]"),
    Case("deepseek", MARKED["deepseek"], "```json"),
]
FLAT = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "maxLength": 24},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "unit": {"enum": ["c", "great f"]},
    },
    "required": ["at"],
}
DEEP = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "pattern": "^[a-z/]{1,6}$"},
        "when": {"type": "string", "format": "date"},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]},
        "both": {"type": ["string", "integer"], "maxLength": 4},
        "code": {"type": "string", "maxLength": 4000},
        "odd": {"enum": ["<b>", "a]]>", "a & b\n"]},
        "flag": {"type": "boolean"},
        "mixed": {"enum": ["red", 7, None]},
        "edits": {
            "type": "array",
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {"old": {"type": "string", "maxLength": 30}},
                "required": ["old"],
                "additionalProperties": False,
            },
        },
        "box": {"$ref": "#/$defs/box"},
        "name": {"$ref": "#/$defs/name"},
    },
    "required": ["edits", "both", "path"],
    "$defs": {
        "box": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": 0, "maximum": 9}},
            "additionalProperties": False,
        },
        "name": {"type": "string", "minLength": 2, "maxLength": 9},
    },
}
SCHEMAS = {"look": FLAT, "edit_file": DEEP, "now": None}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
# Texts that would end a value, a call or a thought if a quotation were taken for markup.
HOSTILE = (
    *("</parameter>", "\n</parameter>\n", "</arg_value>", "</｜DSML｜parameter>", "</tool_call>"),
    *("```", "\n", "\\", '"', '"}', "}}", "<|call|>", "<|end|>", "<|END_ACTION|>", "]"),
    *(
        "[TOOL_CALLS]",
        "[ARGS]{",
        "<｜tool▁calls▁end｜>",
        "<|tool_calls_section_end|>",
        "größer 東京",
        "<escape>",
        "<end_function_call>",
        "<tool_call|>",
        "]]>",
        "]]></param>",
        "<![CDATA[",
        "</function>",
        "<|close|>argument<|sep|>",
        "<|close|>tools<|sep|>",
        "]<]minimax[>[",
        "</at>",
    ),
)


def select_format(name):
    if name in UPSTREAM:
        return AnswerFormat(calls=parser_named(name))
    if name == "kimi_k3":
        return replace(marked(name, "think"), hidden_marks=RESPONSE)
    return AnswerFormat(messages=GPT_OSS.messages) if name == "harmony" else marked(name, "think")


def reader_of(name, choice, tools=TOOLS):
    if name == "harmony":
        return HarmonyReader((), tools, "operation-1", choice)
    return MarkedReader(select_format(name), (), tools, "operation-1", choice)


def grammar_of(case, choice, tools=TOOLS):
    write = select_format(case.name).grammar
    assert write is not None
    options = GrammarOptions(
        case.template, frozenset(case.specials), frozenset(), choice.takes_one, choice.must_call
    )
    walking = walker(*case.specials)
    return walking.compiler.compile_expression(write(callable_tools(tools, choice), options))


def check(case, choice, seen, text):
    assert (seen.text, seen.broken) == ("", 0), text
    assert len(seen.calls) == 1 if choice.takes_one else seen.calls, text
    assert len(set(seen.ids)) == len(seen.ids), text
    for name, arguments in seen.calls:
        assert not choice.names or name in choice.names
        jsonschema.validate(arguments, SCHEMAS[name] or {"maxProperties": 0})


@pytest.mark.parametrize("seeds", sample([range(2), range(2, 20)], range(2)), ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_generated_calls_are_read_as_valid_calls(case, seeds):
    ended = 0
    for names in ((), ("look",), ("edit_file",)):
        for takes_one in (False, True):
            choice = CallChoice(must_call=True, names=names, takes_one=takes_one)
            grammar = grammar_of(case, choice)
            for seed in seeds:
                rng = random.Random(f"{case} {choice} {seed}")
                text = walker(*case.specials).walk(grammar, rng, HOSTILE)
                if text is None:
                    continue
                ended += 1
                pieces = cut(text, [rng.randrange(9_999) for _ in range(rng.randrange(60))])
                check(case, choice, read(reader_of(case.name, choice), pieces), text)
    assert ended > 3 * len(seeds)


# Lines of a patch: they may contain a value's end mark, which must be read as their text.
LINES = r"^(?:\*\*\* (?:Add|Delete): .{0,12}\n(?:[+\- ].{0,24}\n){0,3}\*\*\* End\n?)$"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_argument_with_a_pattern_is_read_back_unchanged(case):
    text = {"type": "string", "pattern": LINES}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    tools = [{"type": "function", "function": {"name": "patch", "parameters": schema}}]
    choice = CallChoice(must_call=True, strict=("patch",), takes_one=True)
    grammar, ended = grammar_of(case, choice, tools), 0
    for seed in range(6):
        answer = walker(*case.specials).walk(grammar, random.Random(seed), HOSTILE)
        if answer is None:
            continue
        ended += 1
        seen = read(reader_of(case.name, choice, tools), [answer])
        assert (seen.text, seen.broken) == ("", 0), answer
        ((_, arguments),) = seen.calls
        assert re.fullmatch(LINES, arguments["input"]), answer
    assert ended > 3


# Recursive rules: sums in brackets, and texts in quotes that JSON has to escape.
ROUND = lark_rules(
    "start: part (SIGN part)*\n"
    'part: /[0-9]{1,3}/ | "(" start ")" | "\\"" /[a-d\\\\]{0,4}/ "\\""\n'
    "SIGN: /[+*\\/-]/"
)


def reduces_to_one(text):
    text, before = re.sub(r'[0-9]{1,3}|"[a-d\\]{0,4}"', "1", text), None
    while before != text:
        before, text = text, re.sub(r"\(1\)|1[+*/-]1", "1", text)
    return text == "1"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_argument_with_recursive_rules_is_read_back_unchanged(case):
    """Recursive rules have no regular expression: they are written as rules."""
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tools = [{"type": "function", "function": {"name": "count", "parameters": schema}}]
    texts = (ToolText("count", ROUND),)
    choice = CallChoice(must_call=True, strict=("count",), takes_one=True, texts=texts)
    grammar, read_texts = grammar_of(case, choice, tools), []
    for seed in range(24):
        answer = walker(*case.specials).walk(grammar, random.Random(seed), HOSTILE, tokens_max=200)
        if answer is None:
            continue
        seen = read(reader_of(case.name, choice, tools), [answer])
        assert (seen.text, seen.broken) == ("", 0), answer
        ((_, arguments),) = seen.calls
        assert reduces_to_one(arguments["input"]), answer
        read_texts.append(arguments["input"])
    assert len(read_texts) > 3
    assert any(char in text for char in '("' for text in read_texts)


def test_channels_allow_a_strict_call_or_a_text():
    """The model decides, as no single token begins a call."""
    case, choice = Case("harmony", MARKED["harmony"]), CallChoice(strict=("look",), names=("look",))
    grammar, called, texts_only = grammar_of(case, choice), 0, 0
    for seed in range(40):
        answer = walker(*case.specials).walk(grammar, random.Random(seed))
        if answer is None:
            continue
        seen = read(reader_of(case.name, choice), [answer])
        assert seen.broken == 0, answer
        assert {name for name, _ in seen.calls} <= {"look"}
        for _, arguments in seen.calls:
            jsonschema.validate(arguments, FLAT)
        called += bool(seen.calls)
        texts_only += not seen.calls
    assert called > 2
    assert texts_only > 2


def test_channels_allow_several_calls_unless_one_is_taken():
    """Every message but the last has an end mark that does not end the answer."""
    case, counts = Case("harmony", MARKED["harmony"]), {False: set(), True: set()}
    for takes_one, seen in counts.items():
        choice = CallChoice(must_call=True, names=("look", "now"), takes_one=takes_one)
        grammar = grammar_of(case, choice)
        for seed in range(30):
            answer = walker(*case.specials).walk(grammar, random.Random(seed))
            if answer is not None:
                read_calls = read(reader_of(case.name, choice), [answer])
                check(case, choice, read_calls, answer)
                assert answer.count("<|call|>") == 1
                seen.add(len(read_calls.calls))
    assert counts[True] == {1}
    assert {1, 2} <= counts[False]


def test_every_format_has_a_grammar():
    assert all(each.grammar is not None for each in CALL_FORMATS.values())
    assert {case.name for case in CASES} == {*CALL_FORMATS, "harmony", *UPSTREAM}
    assert all(walker(*specials) for specials in MARKED.values())


ODD = {
    "a tool": {"mistral": 0, "kimi_k2": 1, "deepseek": 1, "gemma": 1, "glm": 1, "harmony": 1},
    "functions.x": {"kimi_k2": 1},
    "if": {"gemma": 1},
}
REFUSED = [(odd, name) for odd, names in ODD.items() for name, counts in names.items() if counts]


@pytest.mark.parametrize(("odd", "name"), REFUSED)
def test_tool_name_that_the_format_cannot_spell_is_refused(odd, name):
    tools = [{"type": "function", "function": {"name": odd}}]
    case = Case(name, MARKED.get(name, ()))
    with pytest.raises(RejectedError, match=f"the tool '{odd}'") as caught:
        grammar_of(case, CallChoice(must_call=True), tools)
    assert (int(caught.value.status), caught.value.param) == (400, "tools")


@pytest.mark.parametrize("schema", [{"type": "string"}, [], {"type": ["null"]}])
def test_parameters_other_than_an_object_schema_are_refused(schema):
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(RejectedError, match="not the schema of an object"):
        callable_tools(tools, CallChoice(must_call=True))


def test_additional_properties_are_off_unless_strict():
    (tool,) = callable_tools(TOOLS[:1], CallChoice())
    assert tool.parameters["additionalProperties"] is False
    free = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    (tool,) = callable_tools(free, CallChoice(strict=("f",)))
    assert (tool.parameters, tool.is_strict) == ({"type": "object"}, True)


@pytest.mark.parametrize("name", ["json", "qwen3_coder", "mistral", "llama", "gemma"])
def test_call_of_a_disallowed_tool_is_text(name):
    says = {
        "json": '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "qwen3_coder": "<tool_call><function=now></function></tool_call>",
        "mistral": "[TOOL_CALLS]now[ARGS]{}",
        "llama": '{"name": "now", "parameters": {}}',
        "gemma": "```tool_code\nnow()\n```",
    }[name]
    for names, count in ((("look",), 0), (("look", "now"), 1)):
        seen = read(reader_of(name, CallChoice(names=names)), list(says))
        assert (len(seen.calls), seen.text == says) == (count, count == 0)


def test_only_first_call_is_reported_if_one_is_taken():
    says = '<tool_call>{"name": "now", "arguments": {}}</tool_call>' * 2
    assert len(read(reader_of("json", CallChoice()), [says]).calls) == 2
    seen = read(reader_of("json", CallChoice(takes_one=True)), list(says))
    assert (len(seen.calls), len(seen.parts), seen.text) == (1, 1, "")


def test_calls_inside_a_thought_stay_text_if_a_call_is_forced():
    says = '<think>\n<tool_call>{"name": "now"}</tool_call></think>\n'
    seen = read(reader_of("json", CallChoice(must_call=True)), list(says))
    assert (seen.calls, seen.reasoning) == ([], '<tool_call>{"name": "now"}</tool_call>')
