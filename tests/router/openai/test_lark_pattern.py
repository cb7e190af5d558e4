"""Grammars as one regular expression, or as rules, accept the grammar's texts."""

import random
import re

import pytest

from fabric.turn.answer_constraints import respelled_rules
from node.grammar.compiler import _compile_grammar
from node.grammar.lark import lark_grammar
from router.openai.lark_pattern import NoPatternError, lark_pattern, lark_rules
from tests.support.random_walk import walker

PATCH = """
start: begin hunk+ end_patch
begin: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add | delete // of a file
add: "*** Add File: " filename LF add_line+
delete: "*** Delete File: " filename LF
filename: /(.{1,9})/
add_line: "+" /(.{0,9})/ LF -> line
%import common.LF
"""
SUMS = """
start: sum
?sum: product (SP ADD SP product)* -> add
    | product
product: INT (SP MUL SP INT)~0..2
SP: " "
ADD: "+" | "-"
MUL: /[*\\/]/
%import common (INT, WS)
"""
SPACED = """
start.1: "select"i NAME ["," NAME] _END
_END: ";" | "\\n" # of either kind
NAME: LETTER{1,3} ("0".."9")*
%import common.LETTER
%ignore " "
"""
CASES = {
    "patch": (
        PATCH,
        ["*** Begin Patch\n*** Delete File: a\n*** End Patch"],
        ["", "*** Begin Patch"],
    ),
    "sums": (SUMS, ["1", "4 + 2 * 3 / 4", "1 - 1"], ["1+1", "1 +", "1 * 1 * 1 * 1"]),
    "spaced": (SPACED, ["SELECT  ab12 , c ;", "selectabc\n"], ["select 1;", "select ab, cd ef;"]),
    "one": ('start: "a" | \n | "b"\n', ["a", "b", ""], ["ab"]),
    "quoted": (r'start: "\"" /[^"\\]*/ "\""', ['"x"'], ['"x']),
}


@pytest.mark.parametrize("name", CASES)
def test_pattern_matches_exactly_the_texts_of_grammar(name):
    grammar, fitting, others = CASES[name]
    pattern = re.compile(lark_pattern(grammar))
    assert [text for text in fitting if not pattern.fullmatch(text)] == []
    assert [text for text in others if pattern.fullmatch(text)] == []


@pytest.mark.parametrize("name", ["patch", "sums"])
def test_pattern_matches_random_walks_of_compiled_grammar(name):
    pattern = re.compile(lark_pattern(CASES[name][0]))
    walking, rng = walker(), random.Random(name)
    grammar = _compile_grammar(walking.compiler.vocabulary(), lark_grammar(CASES[name][0]))
    walks = [walking.walk(grammar, rng) for _ in range(40)]
    ended = [text for text in walks if text is not None]
    assert len(ended) > 9
    assert [text for text in ended if not pattern.fullmatch(text)] == []


WRONG = {
    "rule 'expr' refers to itself": 'start: expr\nexpr: "(" expr ")" | "1"',
    "no rule 'start'": 'begin: "a"',
    "no rule 'b'": "start: b",
    "line 2 of the grammar": 'start: "a"\n  § "b"',
    "at '\\)'": 'start: "a" )',
    "too early": "%import",
    "cannot be imported": 'start: "a"\n%import python.FLOAT',
    "a template": 'start: sep{"a"}',
    "characters": f"start: {' '.join(chr(34) + 'x' * 99 + chr(34) for _ in range(11))}",
    "nested too deeply": "start: " + "(" * 4_000,
    "more than 8192": "start: " + "a " * 5_000,
    "cannot be parsed": 'start: ("a"',
}


@pytest.mark.parametrize("reason", WRONG)
def test_inexpressible_grammar_is_rejected_with_reason(reason):
    with pytest.raises(ValueError, match=reason):
        lark_pattern(WRONG[reason])


def test_arbitrary_text_is_parsed_or_rejected():
    rng = random.Random(7)
    pieces = [*'()[]{}|?*+~.:\n"/-> ', "start:", "%import", "%ignore", "common", "a", "A", "2", "i"]
    for _ in range(5_000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(20)))
        try:
            lark_pattern(text)
        except ValueError:
            continue


ROUND = """
start: value
value: "[" [value ("," value)*] "]" | pair | "-" value | DIGITS | QUOTED
?pair: "(" value WS? ":" WS? value ")"
DIGITS: /[0-9]{1,3}/
QUOTED: "\\"" /[^"\\\\]{0,3}/ "\\""
%import common.WS
"""


def rules_of(definition):
    lines = respelled_rules(lark_rules(definition), "t", str)
    return compiled("\n".join(["start: t_r0", *lines]))


def compiled(lark):
    return _compile_grammar(walker().compiler.vocabulary(), lark_grammar(lark))


def test_rules_match_exactly_the_texts_of_grammar():
    with pytest.raises(NoPatternError):
        lark_pattern(ROUND)
    ours, theirs, accepts = rules_of(ROUND), compiled(ROUND), walker().accepts
    fitting = ["[]", "1", "[1,[22],-3]", '("a" : [1])', '-"x y"', "(1:\t(2:3))"]
    assert [text for text in fitting if not accepts(ours, text)] == []
    others = ["", "[", "[1,]", "(1)", "1234", '"\\"', "--", "(1:2", "[]]"]
    assert [text for text in others if accepts(ours, text)] == []
    rng = random.Random(1)
    walks = [walker().walk(ours, rng, tokens_max=60) for _ in range(40)]
    ended = [text for text in walks if text is not None]
    assert len(ended) > 9
    assert [text for text in ended if not accepts(theirs, text)] == []
    spaced = rules_of(f'{ROUND}%ignore "~"')
    assert [text for text in ("[~1~,2]~", "-~~3") if not accepts(spaced, text)] == []


@pytest.mark.parametrize(
    "rules", ["", "r0", "r1: /a/", "r0: /a", "r0: x", "r0: r1", "r0: /a/ %json", "r0: /a/\n"]
)
def test_invalid_rules_are_rejected(rules):
    with pytest.raises(ValueError, match="are invalid"):
        respelled_rules(rules, "t", str)


@pytest.mark.parametrize(
    ("definition", "ends"),
    [
        ('start: "1" start', False),
        ('start: "1" start?', True),
        ('start: "1" start~0..2', True),
        ('start: "1" start~1..2', False),
        ('start: a | b\na: b "1"\nb: a', False),
        ('start: a | b\na: b "1"\nb: a | ("2" | start)', True),
        ("start: (start | )", True),
        ('start: ("1" start)+ | a*\na: a', True),
    ],
)
def test_rules_without_finite_text_are_rejected(definition, ends):
    if ends:
        assert rules_of(definition)
        return
    with pytest.raises(ValueError, match="no finite text matches"):
        rules_of(definition)
