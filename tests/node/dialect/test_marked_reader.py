"""Answers of every format, whole, by the character and in random pieces: all read the same."""

import random
from copy import deepcopy

import pytest

from node.dialect.format_selection import CALL_FORMATS, THOUGHT_FORMATS
from tests.node.dialect.answer_case import BASH, LOOK, NOW, Case
from tests.node.dialect.reading import TOOLS, add, cut, marked, marked_reader, read
from tests.node.dialect.reading import Read as Seen
from tests.node.dialect.typed_answers import TYPED

QWEN = (
    "<tool_call>\n<function=look>\n<parameter=at>\nthe sky\n</parameter>\n</function>\n</tool_call>"
)
SEED = "<seed:tool_call>\n<function=look>\n<parameter=at>the sky</parameter>\n</function>\n"
SEED += "</seed:tool_call>"
GLM = "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>the sky</arg_value>\n</tool_call>"
JSON_BASH = r'{"command": "echo \"</tool_call>\"\n\tls {}", "timeout": 5}'
JSON = '<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>'
CASES = {
    **TYPED,
    "text": Case("Hello.\n\nWorld\n", "Hello.\n\nWorld\n"),
    "thought": Case("<think>\nHm.\n\nSo.\n</think>\n\nYes.", "Yes.", "Hm.\n\nSo."),
    "opened thought": Case("Hm.\n</think>\n\nYes.", "Yes.", "Hm.", tail="<think>\n"),
    "closed thought": Case("\n\nYes.\n", "Yes.\n", tail="<think>\n\n</think>\n\n"),
    "cut thought": Case("<think>\nHm", "", "Hm"),
    "only a thought": Case("<think>Hm</think>\n\n", "", "Hm"),
    "a mark in the text": Case("Write <think> first.", "Write <think> first."),
    "half a mark": Case("a <thin", "a <thin"),
    "seed": Case("<seed:think>Hm</seed:think>Yes", "Yes", "Hm", thoughts_as="seed"),
    "mistral's thought": Case("[THINK]Hm[/THINK]Yes", "Yes", "Hm", thoughts_as="mistral"),
    "gemma's thought": Case(
        "<|channel>thought\nHm<channel|>Yes", "Yes", "Hm", thoughts_as="gemma4"
    ),
    "stop": Case("One. Two. STOP three", "One. Two. ", stop=("STOP",), stopped_by="STOP"),
    "stop in a thought": Case("<think>STOP\n</think>\nYes.", "Yes.", "STOP", stop=("STOP", "<th")),
    "half a stop": Case("One ST", "One ST", stop=("STOP",)),
    "stop at a line's end": Case("One\n\nTwo", "One", stop=("\n\n",), stopped_by="\n\n"),
    "stop within a stop": Case("xabcd", "x", stop=("bc", "abcd", "abc"), stopped_by="abc"),
    "no stop in a call": Case(f"Hi\n{JSON}", "Hi", calls=(LOOK,), stop=("sky", "tool")),
    "json": Case(f"Let me look.\n{JSON}", "Let me look.", calls=(LOOK,)),
    "json behind a thought": Case(f"<think>\nHm\n</think>\n\n{JSON}\n", "", "Hm", (LOOK,)),
    "json in a thought": Case(f"<think>\nHm\n{JSON}", "", "Hm", (LOOK,)),
    "two in a thought": Case(f"<think>\nHm\n{JSON}\n{JSON}\n", "", "Hm", (LOOK, LOOK)),
    "json quoted in a thought": Case(
        f"<think>\nHm\n{JSON}\n</think>\n\nYes.", "Yes.", f"Hm\n{JSON}"
    ),
    "json quoted within a thought": Case(
        f"<think>{JSON} or so.\n</think>\n{JSON}", "", f"{JSON} or so.", (LOOK,)
    ),
    "a mark quoted in a thought": Case(
        "<think>A <tool_call> is JSON.</think>Yes.", "Yes.", "A <tool_call> is JSON."
    ),
    "half a call quoted in a thought": Case(
        '<think>\nI write <tool_call>{"name": "look</think>Yes.',
        "Yes.",
        'I write <tool_call>{"name": "look',
    ),
    "no call quoted in a thought": Case(
        "<think>Hm <tool_call>x</tool_call>\n</think>Yes.",
        "Yes.",
        "Hm <tool_call>x</tool_call>",
    ),
    "a call quoted in an opened thought": Case(
        f"{JSON}\n</think>\n{JSON}", "", JSON, (LOOK,), tail="<think>\n"
    ),
    "a thought that ends at once": Case(f"</think>\n\nYes. {JSON}", "Yes. ", calls=(LOOK,)),
    "the end of a thought in the text": Case("Write </think> last.", "Write </think> last."),
    "marks and quotes in a call in a thought": Case(
        f'<think>Hm<tool_call>{{"name": "bash", "arguments": {JSON_BASH}}}</tool_call>',
        "",
        "Hm",
        (BASH,),
    ),
    "two json": Case(f"{JSON}\n{JSON}", calls=(LOOK, LOOK)),
    "json with text behind": Case(f"A\n\n{JSON}\nB", "A\n\nB", calls=(LOOK,)),
    "marks and quotes in json": Case(
        f'<tool_call>{{"name": "bash", "arguments": {JSON_BASH}}}</tool_call>', calls=(BASH,)
    ),
    "json, arguments first": Case(
        f'<tool_call>{{"arguments": {JSON_BASH}, "name": "bash"}}</tool_call>', calls=(BASH,)
    ),
    "json in a text": Case(
        '<tool_call>{"name": "look", "arguments": "{\\"at\\": \\"the sky\\"}"}</tool_call>',
        calls=(LOOK,),
    ),
    "json without arguments": Case('<tool_call>{"name": "now"}</tool_call>', calls=(NOW,)),
    "json with null": Case('<tool_call>{"name":"now","arguments":null}</tool_call>', calls=(NOW,)),
    "json as in the API": Case(
        '<tool_call>{"type":"function","function":{"name":"look","arguments":{"at":"the sky"}}}'
        "</tool_call>",
        calls=(LOOK,),
    ),
    "json in a list": Case(
        '<tool_call>[{"name": "now", "arguments": {}}, {"name": "look", "arguments": '
        '{"at": "the sky"}}]</tool_call>',
        calls=(NOW, LOOK),
    ),
    "no end mark": Case(JSON.removesuffix("\n</tool_call>"), calls=(LOOK,)),
    "cut json": Case(
        'Hm\n\n<tool_call>\n{"name": "look", "arguments": {"at": "the',
        "Hm",
        broken=1,
        begun=(("look", '{"at": "the'),),
    ),
    "broken json": Case(
        '<tool_call>{"name": "look", "arguments": {"at": }}</tool_call> Hm',
        " Hm",
        broken=1,
        begun=(("look", '{"at": }'),),
    ),
    "one good, one cut, in a list": Case(
        '<tool_call>[{"name": "now", "arguments": {}}, {"na',
        '<tool_call>, {"na',
        calls=(NOW,),
        broken=1,
    ),
    "no json": Case("<tool_call>look</tool_call>", "<tool_call>look</tool_call>", broken=1),
    "nothing": Case("<tool_call></tool_call>", "<tool_call></tool_call>", broken=1),
    "one good, one cut": Case(
        f'{JSON}<tool_call>{{"name": "now"', calls=(LOOK,), broken=1, begun=(("now", ""),)
    ),
    "qwen3_coder": Case(f"Hm.\n\n{QWEN}", "Hm.", calls=(LOOK,), calls_as="qwen3_coder"),
    "qwen3_coder, two": Case(f"{QWEN}\n{QWEN}", calls=(LOOK, LOOK), calls_as="qwen3_coder"),
    "qwen3_coder without its mark": Case(
        QWEN.removeprefix("<tool_call>\n"), calls=(LOOK,), calls_as="qwen3_coder"
    ),
    "qwen3_coder, many kinds": Case(
        '<tool_call>\n<function=bash>\n<parameter=command>\necho "</tool_call>"\n\tls {}\n'
        "</parameter>\n<parameter=timeout>\n5\n</parameter>\n</function>\n</tool_call>",
        calls=(BASH,),
        calls_as="qwen3_coder",
    ),
    "qwen3_coder, nothing to say": Case(
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        calls=(NOW,),
        calls_as="qwen3_coder",
    ),
    "qwen3_coder, lines kept": Case(
        "<tool_call><function=look><parameter=at>\n\na\n\n</parameter></function></tool_call>",
        calls=(("look", {"at": "\na\n"}),),
        calls_as="qwen3_coder",
    ),
    "qwen3_coder, cut": Case(
        "Hm\n<tool_call>\n<function=look>\n<parameter=at>\nthe",
        "Hm",
        calls_as="qwen3_coder",
        broken=1,
        begun=(("look", '{"at": "the'),),
    ),
    "seed_oss": Case(
        f"<seed:think>Hm</seed:think>{SEED}",
        "",
        "Hm",
        (LOOK,),
        "seed_oss",
        "seed",
    ),
    "glm": Case(f"Hm.\n{GLM}", "Hm.", calls=(LOOK,), calls_as="glm"),
    "glm, many kinds": Case(
        '<tool_call>bash<arg_key>command</arg_key><arg_value>echo "</tool_call>"\n\tls {}'
        "</arg_value><arg_key>timeout</arg_key><arg_value>5</arg_value></tool_call>",
        calls=(BASH,),
        calls_as="glm",
    ),
    "glm, a text about it": Case(
        *2 * ("A <tool_call> has tags such as <arg_key>.",), calls_as="glm", broken=1
    ),
    "glm, nothing to say": Case("<tool_call>now</tool_call>", calls=(NOW,), calls_as="glm"),
    "glm, unknown": Case(
        "<tool_call>go<arg_key>to</arg_key><arg_value>[1, 2]</arg_value></tool_call>",
        calls=(("go", {"to": [1, 2]}),),
        calls_as="glm",
    ),
    "glm, cut between": Case(
        "<tool_call>look<arg_key>at</arg_key><arg_value>x</arg_value>",
        calls_as="glm",
        broken=1,
        begun=(("look", '{"at": "x"'),),
    ),
    "minimax": Case(
        '<think>\nHm\n</think>\n\nSo.\n<minimax:tool_call>\n<invoke name="look">\n'
        '<parameter name="at">the sky</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        "So.",
        "Hm",
        (LOOK, NOW),
        "minimax_m2",
    ),
    "minimax, lines kept": Case(
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">\na\n</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        calls=(("look", {"at": "\na\n"}),),
        calls_as="minimax_m2",
    ),
    "seed_oss, lines kept": Case(
        SEED.replace("the sky", "\na\n"),
        calls=(("look", {"at": "\na\n"}),),
        calls_as="seed_oss",
    ),
    "deepseek 3.2": Case(
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="bash">\n<｜DSML｜parameter '
        'name="command" string="true">ls</｜DSML｜parameter>\n<｜DSML｜parameter name="timeout" '
        'string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        calls=(("bash", {"command": "ls", "timeout": 5}),),
        calls_as="deepseek_v32",
    ),
    "kimi": Case(
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        '<|tool_call_argument_begin|>{"at": "the sky"}<|tool_call_end|><|tool_call_begin|>'
        "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "Hm.",
        calls=(LOOK, NOW),
        calls_as="kimi_k2",
        ids=("functions.look:0", "functions.now:1"),
    ),
    "kimi, second one cut": Case(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>functions.lo",
        "<|tool_calls_section_begin|><|tool_call_end|><|tool_call_begin|>functions.lo",
        calls=(NOW,),
        calls_as="kimi_k2",
        broken=1,
    ),
    "deepseek": Case(
        "Hm.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
        '{"at": "the sky"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        calls=(LOOK, NOW),
        calls_as="deepseek",
    ),
    "deepseek, as its first ones wrote": Case(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"at": "the sky"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now'
        "\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls=(LOOK, NOW),
        calls_as="deepseek",
    ),
    "mistral": Case(
        '[TOOL_CALLS][{"name": "look", "arguments": {"at": "the sky"}, "id": "abcdefghi"}]',
        calls=(LOOK,),
        calls_as="mistral",
    ),
    "mistral, named in front": Case(
        'Hm.[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"at": "the sky"}[TOOL_CALLS]now[ARGS]{}',
        "Hm.",
        calls=(LOOK, NOW),
        calls_as="mistral",
    ),
    "mistral, its id": Case(
        '[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"at": "the sky"}',
        calls=(LOOK,),
        calls_as="mistral",
        ids=("abcdefghi",),
    ),
    "mistral, cut": Case(
        '[TOOL_CALLS]look[ARGS]{"at": "the',
        calls_as="mistral",
        broken=1,
        begun=(("look", '{"at": "the'),),
    ),
    "mistral, its list cut": Case(
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "look", "arguments": {"at": "th',
        calls=(NOW,),
        calls_as="mistral",
        broken=1,
        begun=(("look", '{"at": "th'),),
    ),
    "granite": Case(
        '<|tool_call|>[{"name": "look", "arguments": {"at": "the sky"}}]',
        calls=(LOOK,),
        calls_as="granite",
    ),
    "phi4": Case(
        '<|tool_call|>[{"name": "look", "arguments": {"at": "the sky"}}]<|/tool_call|>',
        calls=(LOOK,),
        calls_as="phi4",
    ),
    "command": Case(
        "<|START_THINKING|>Hm<|END_THINKING|><|START_ACTION|>[\n"
        '{"tool_call_id": "0", "tool_name": "look", "parameters": {"at": "the sky"}}\n]'
        "<|END_ACTION|>",
        "",
        "Hm",
        (LOOK,),
        "command",
        "command",
    ),
    "command_r": Case(
        'Plan: I look.\nAction: ```json\n[\n    {\n        "tool_name": "look",\n        '
        '"parameters": {"at": "the sky"}\n    }\n]\n```',
        "Plan: I look.",
        calls=(LOOK,),
        calls_as="command_r",
    ),
    "nemotron": Case(
        "<think>\nHm\n</think>\n\nSo.\n\n<TOOLCALL>["
        '{"name": "look", "arguments": {"at": "the sky"}}, {"name": "now", "arguments": {}}'
        "]</TOOLCALL>\n",
        "So.",
        "Hm",
        (LOOK, NOW),
        "nemotron",
    ),
    "hunyuan": Case(
        '<tool_calls>[{"name": "look", "arguments": {"at": "the sky"}}]</tool_calls>',
        calls=(LOOK,),
        calls_as="hunyuan",
    ),
    "apertus": Case(
        '<|inner_prefix|>Hm<|inner_suffix|><|tools_prefix|>[{"look": {"at": "the sky"}}, '
        '{"now": {}}]<|tools_suffix|>',
        "",
        "Hm",
        (LOOK, NOW),
        "apertus",
        "apertus",
    ),
    "apertus, cut": Case(
        '<|tools_prefix|>[{"look": {"at": "the',
        calls_as="apertus",
        broken=1,
        begun=(("look", '{"at": "the'),),
    ),
    "longcat's thought": Case(
        "<longcat_think>\nHm\n</longcat_think>\nYes.", "Yes.", "Hm", thoughts_as="longcat"
    ),
    "llama": Case(
        '{"name": "look", "parameters": {"at": "the sky"}}', calls=(LOOK,), calls_as="llama"
    ),
    "llama, typed": Case(
        '{"type": "function", "name": "look", "parameters": {"at": "the sky"}}',
        calls=(LOOK,),
        calls_as="llama",
    ),
    "llama, two": Case(
        '{"name": "now", "parameters": {}}; {"name": "look", "parameters": {"at": "the sky"}}',
        calls=(NOW, LOOK),
        calls_as="llama",
    ),
    "llama, marked": Case(
        '<|python_tag|>{"name": "look", "parameters": {"at": "the sky"}}',
        calls=(LOOK,),
        calls_as="llama",
    ),
    "llama, in Python": Case(
        '<|python_tag|>look.call(at="the sky")', calls=(LOOK,), calls_as="llama"
    ),
    "llama, another's name": Case(
        '{"name": "Mira", "age": 3}', '{"name": "Mira", "age": 3}', calls_as="llama"
    ),
    "llama, JSON that is no call": Case(
        ' {"look": [1]} STOP',
        ' {"look": [1]} ',
        calls_as="llama",
        stop=("STOP",),
        stopped_by="STOP",
    ),
    "llama4": Case('[look(at="the sky"), now()]', calls=(LOOK, NOW), calls_as="llama4"),
    "llama4, a list": Case("[1] The sky.", "[1] The sky.", calls_as="llama4"),
    "llama4, a name": Case("[look] at that", "[look] at that", calls_as="llama4"),
    "llama4, cut": Case("[look(at=", calls_as="llama4", broken=1, begun=(("look", ""),)),
    "llama4, second one cut": Case(
        '[now(), bash(command="a, (b", timeout=[1',
        calls=(NOW,),
        calls_as="llama4",
        broken=1,
        begun=(("bash", '{"command": "a, (b"'),),
    ),
    "llama, cut": Case(
        '{"name": "look", "parameters": {"at": "the sky"}, "x',
        calls_as="llama",
        broken=1,
        begun=(("look", '{"at": "the sky"}'),),
    ),
    "llama, broken, with text behind": Case(
        '{"name": "look", "parameters": {"at": "the sky"}, oh} no',
        ", oh} no",
        calls_as="llama",
        broken=1,
        begun=(("look", '{"at": "the sky"}'),),
    ),
    "a Python program": Case(
        *2 * ('<|python_tag|>import os\nprint("look(")',), calls_as="llama", broken=1
    ),
    "gemma": Case("```tool_code\nlook(at='the sky')\n```", calls=(LOOK,), calls_as="gemma"),
}


def family(case):
    calls = case.calls_as if case.calls_as != "auto" else "json"
    return marked(calls, case.thoughts_as if case.thoughts_as != "auto" else "think")


@pytest.mark.parametrize("name", CASES)
def test_answer_is_read_the_same_in_any_pieces(name):
    case = CASES[name]
    rng = random.Random(name)
    ways = [[case.says], list(case.says)]
    ways += [cut(case.says, [rng.randrange(999) for _ in range(n)]) for n in (1, 2, 3, 5, 8, 13)]
    seen = [read(marked_reader(family(case), case.tail, case.stop), pieces) for pieces in ways]

    first = seen[0]
    assert (first.text, first.reasoning) == (case.text, case.reasoning)
    assert tuple(first.calls) == case.calls
    assert tuple(first.begun) == case.begun
    assert (first.broken, first.stopped_by) == (case.broken, case.stopped_by)
    assert len(set(first.ids)) == len(first.ids)
    if case.ids is not None:
        assert tuple(first.ids) == case.ids
    assert all(each == first for each in seen[1:])


@pytest.mark.parametrize("name", CASES)
def test_restarted_reader_has_no_memory_of_earlier_text(name):
    case = CASES[name]
    reader, plain = (marked_reader(family(case), case.tail, case.stop) for _ in range(2))
    for earlier in (case.says, f"{JSON}<tool_call>", "<think>"):
        reader.begin(earlier)
    reader.begin(case.tail)
    assert read(reader, [case.says]) == read(plain, [case.says])


def test_every_format_has_a_case():
    elsewhere = {"json", "longcat", "muse_spark"}  # by other formats' cases, and round trips
    assert {case.calls_as for case in CASES.values()} >= set(CALL_FORMATS) - elsewhere
    assert {case.thoughts_as for case in CASES.values()} >= set(THOUGHT_FORMATS) - {"think"}


@pytest.mark.parametrize("name", CASES)
def test_copied_reader_is_independent(name):
    case = CASES[name]
    reader, plain = (marked_reader(family(case), case.tail, case.stop) for _ in range(2))
    for char in case.says:
        ahead = deepcopy(reader, {id(TOOLS): TOOLS}).feed(char)
        assert ahead == reader.feed(char) == plain.feed(char)
    assert reader.finish() == plain.finish()


@pytest.mark.parametrize("says", [JSON, f"Look: {JSON}\n", '<tool_call>{"na'])
def test_markup_is_text_without_tools(says):
    assert read(marked_reader(family(CASES["json"]), tools=None), list(says)).text == says


def test_arguments_are_streamed_before_their_end():
    reader = marked_reader(marked("json"))
    seen = Seen()
    for char in '<tool_call>{"name": "look", "arguments": {"at": "the s':
        add(seen, reader.feed(char))

    assert list(seen.parts.values()) == [("look", '{"at": "the s')]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax", "deepseek", "kimi"])
def test_other_formats_stream_arguments_before_their_end(name):
    case = CASES[name]
    reader, seen = marked_reader(family(case)), Seen()
    for char in case.says[: case.says.index("the sky") + 5]:
        add(seen, reader.feed(char))

    ((called, arguments),) = seen.parts.values()
    assert (called, arguments) == ("look", '{"at": "the s')


def test_call_ids_are_nine_alphanumerics_and_deterministic():
    one, two = (read(marked_reader(marked("json")), [f"{JSON}{JSON}"]).ids for _ in range(2))

    assert one == two
    assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in one)
    assert len(set(one)) == 2
