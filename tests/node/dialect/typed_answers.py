"""Answers of families that mark the types of values by marks, quotes or types."""

from tests.node.dialect.answer_case import LOOK, NOW, Case

SEP = "]<]minimax[>["
_LOOK = f'{SEP}<invoke name="look">{SEP}<at>the sky{SEP}</at>{SEP}</invoke>\n'


def _m3(*calls):
    return f"{SEP}<tool_call>\n{''.join(calls)}{SEP}</tool_call>"


TYPED = {
    "gemma 4": Case(
        '<|channel>thought\nHm<channel|>So.<|tool_call>call:look{at:<|"|>the sky<|"|>}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "So.",
        "Hm",
        (LOOK, NOW),
        "gemma4",
        "gemma4",
    ),
    "gemma 4, all kinds of values": Case(
        '<|tool_call>call:go{a:[1,<|"|>x, {y}: [z]<|"|>,{b:None}],<|"|>c d<|"|>:{e-f:true , g:-1.5}'
        ',h:<|"|>"<tool_call|>\n<|"|>,i:North,j:NaN}<tool_call|>',
        calls=(
            (
                "go",
                {
                    "a": [1, "x, {y}: [z]", {"b": None}],
                    "c d": {"e-f": True, "g": -1.5},
                    "h": '"<tool_call|>\n',
                    "i": "North",
                    "j": "NaN",
                },
            ),
        ),
        calls_as="gemma4",
    ),
    "gemma 4, cut in a text": Case(
        '<|tool_call>call:look{at:<|"|>the <',
        calls_as="gemma4",
        broken=1,
        begun=(("look", '{"at": "the '),),
    ),
    "gemma 4, brackets that do not fit": Case(
        "<|tool_call>call:look{at:[1}]<tool_call|>",
        calls_as="gemma4",
        broken=1,
        begun=(("look", '{"at": [1}]'),),
    ),
    "gemma 4, no call": Case(*2 * ("<|tool_call>hello<tool_call|>",), calls_as="gemma4", broken=1),
    "function gemma": Case(
        "<start_function_call>call:bash{command:<escape>echo {a, b}: <b><escape>,timeout:5}"
        "<end_function_call>\n<start_function_call>call:now{}<end_function_call>",
        calls=(("bash", {"command": "echo {a, b}: <b>", "timeout": 5}), NOW),
        calls_as="function_gemma",
    ),
    "minicpm": Case(
        '<think>\nHm\n</think>\n\n<function name="look"><param name="at">the sky</param>'
        "</function>\n"
        '<function name="now"></function>',
        "",
        "Hm",
        (LOOK, NOW),
        "minicpm5",
    ),
    "minicpm, in quotes": Case(
        '<function name="bash"><param name="command">\n<![CDATA[if a</param>]]\n</function>]]>\n'
        '</param><param name="timeout">5</param></function>',
        calls=(("bash", {"command": "if a</param>]]\n</function>", "timeout": 5}),),
        calls_as="minicpm5",
    ),
    "minicpm, nearly in quotes": Case(
        '<function name="look"><param name="at"><![CD</param></function>',
        calls=(("look", {"at": "<![CD"}),),
        calls_as="minicpm5",
    ),
    "minicpm, cut": Case(
        '<function name="look"><param name="at"><![CDATA[the',
        calls_as="minicpm5",
        broken=1,
        begun=(("look", '{"at": "the'),),
    ),
    "minicpm, a text of it": Case("A <function> is", "A <function> is", calls_as="minicpm5"),
    "minimax 3": Case(
        "<mm:think>Hm</mm:think>So.\n" + _m3(_LOOK, f'{SEP}<invoke name="now">{SEP}</invoke>\n'),
        "So.",
        "Hm",
        (LOOK, NOW),
        "minimax_m3",
        "minimax_m3",
    ),
    "minimax 3, no thought": Case(
        "</mm:think>" + _m3(_LOOK),
        calls=(LOOK,),
        calls_as="minimax_m3",
        thoughts_as="minimax_m3",
    ),
    "minimax 3, quoted in a thought": Case(
        f"{_m3(_LOOK)} perhaps</mm:think>No.",
        "No.",
        f"{_m3(_LOOK)} perhaps",
        calls_as="minimax_m3",
        thoughts_as="minimax_m3",
        tail="<mm:think>",
    ),
    "minimax 3, all kinds of values": Case(
        _m3(
            f'{SEP}<invoke name="go">{SEP}<a>{SEP}<item>1{SEP}</item>{SEP}<item>'
            f"{SEP}<b>null{SEP}</b>{SEP}</item>{SEP}</a>{SEP}<c>{SEP}<c>x <i>y</i>\n{SEP}</c>"
            f"{SEP}<d>true{SEP}</d>{SEP}</c>"
            f"{SEP}<e>\n<p>]]</p>\n{SEP}</e>{SEP}</invoke>\n"
        ),
        calls=(
            (
                "go",
                {
                    "a": [1, {"b": None}],
                    "c": {"c": "x <i>y</i>\n", "d": True},
                    "e": "\n<p>]]</p>\n",
                },
            ),
        ),
        calls_as="minimax_m3",
    ),
    "minimax 3, without some separators": Case(
        f'{SEP}<tool_call>\n<invoke name="bash">{SEP}<command>ls <a></command>{SEP}<timeout>5'
        f"</timeout>{SEP}</invoke>\n{SEP}</tool_call>",
        calls=(("bash", {"command": "ls <a>", "timeout": 5}),),
        calls_as="minimax_m3",
    ),
    "minimax 3, marks in a text": Case(
        _m3(
            f'{SEP}<invoke name="look">{SEP}<at>\n</at> {SEP}</look>{SEP}</tool_call>\n{SEP}</at>'
            f"{SEP}</invoke>\n"
        ),
        calls=(("look", {"at": f"\n</at> {SEP}</look>{SEP}</tool_call>\n"}),),
        calls_as="minimax_m3",
    ),
    "minimax 3, cut": Case(
        f'So.{SEP}<tool_call>\n{SEP}<invoke name="bash">{SEP}<command>ls{SEP}</command>'
        f"{SEP}<timeout>5",
        "So.",
        calls_as="minimax_m3",
        broken=1,
        begun=(("bash", '{"command": "ls", "timeout": '),),
    ),
    "deepseek 4": Case(
        '</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="bash">\n<｜DSML｜parameter '
        'name="command" string="true">ls</｜DSML｜parameter>\n<｜DSML｜parameter name="timeout" '
        'string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        calls=(("bash", {"command": "ls", "timeout": 5}),),
        calls_as="deepseek_v4",
        tail="<think>",
    ),
    "deepseek 4.1": Case(
        'So.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="look">\n<｜DSML｜ parameter name="at" '
        'string="true">the sky</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
        '<｜DSML｜ invoke name="now">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
        "So.",
        calls=(LOOK, NOW),
        calls_as="deepseek_v41",
    ),
    "llama 4, behind empty marks": Case(
        '<|python_start|><|python_end|>{"name": "look", "parameters": {"at": "the sky"}}',
        calls=(LOOK,),
        calls_as="llama4",
    ),
    "llama 4, a list behind empty marks": Case(
        '<|python_start|>\n<|python_end|>[look(at="the sky"), now()]',
        calls=(LOOK, NOW),
        calls_as="llama4",
    ),
    "kimi 3": Case(
        "So.<|open|>tools<|sep|>"
        '<|open|>call tool="look" index="1"<|sep|><|open|>argument key="at" type="string"<|sep|>'
        "the sky<|close|>argument<|sep|><|close|>call<|sep|>"
        '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        "So.",
        calls=(LOOK, NOW),
        calls_as="kimi_k3",
    ),
    "kimi 3, typed": Case(
        '<|open|>tools<|sep|><|open|>call tool="go" index="1"<|sep|>'
        '<|open|>argument key="&amp;&quot;&lt;" type="number"<|sep|>7<|close|>argument<|sep|>'
        '<|open|>argument key="b" type="array"<|sep|>[{"c": null}]<|close|>argument<|sep|>'
        '<|open|>argument key="d" type="string"<|sep|>7<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        calls=(("go", {'&"&lt;': 7, "b": [{"c": None}], "d": "7"}),),
        calls_as="kimi_k3",
    ),
    "kimi 3, in one": Case(
        '<|open|>tools<|sep|><|open|>call tool="bash" index="1"<|sep|><|open|>json type="object"'
        '<|sep|>{"command": "ls", "timeout": 5}<|close|>json<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
        calls=(("bash", {"command": "ls", "timeout": 5}),),
        calls_as="kimi_k3",
    ),
    "kimi 3, cut": Case(
        '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="at"',
        calls_as="kimi_k3",
        broken=1,
        begun=(("look", ""),),
    ),
}
