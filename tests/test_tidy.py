"""Style that no linter knows: sizes, banned calls, docstrings, loose ends.

Each rule is a function from a parsed file to its complaints, and is itself tried on a sample that
breaks it, so a rule cannot rot into one that finds nothing.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("fabric", "node", "router")
EVERYTHING = (*PRODUCT, "tests", "benchmarks")

FILE_LINES_WISHED, FILE_LINES_MAX = 300, 500
FUNCTION_LINES_WISHED, FUNCTION_LINES_MAX = 60, 70

LOOSE_END = re.compile(r"\b(?:TOD[O]|FIXM[E]|XX[X]|HAC[K])\b")
RUNS_CODE = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
WRITES_FILES = "node/store/posix_disk.py"
WRITING_CALLS = {"write_bytes", "write_text"}
WRITING_FLAG = re.compile(r"O_(?:WRONLY|RDWR|CREAT|APPEND|TRUNC)")
# Home-made words, each with the field's own that took its place.
RETIRED = {
    "beat": "heartbeat",
    "befell": "counters",
    "chooser": "sampler",
    "drawn": "sampled",
    "greet": "authenticate, catch up",
    "haste": "low latency",
    "hasty": "low latency",
    "heading": "handover target",
    "introductions": "peer exchange",
    "landing": "pending block, handover",
    "misfit": "corrupt, unexpected",
    "odds": "probability",
    "rival": "alternative",
    "seat": "slot",
    "spare": "replica, fallback, free",
    "standing": "state, admitted turn",
    "stock": "available blocks",
    "thin": "trim",
    "tired": "starved",
}
# Facts of systems and formats, and thresholds: nothing is refused or cut at them.
NO_LIMITS = {
    *("IOVECS_MAX", "SOCKET_PATH_BYTES_MAX", "_CHAR_BYTES_MAX", "_MEMORY_BYTES_MAX", "_BIAS_MAX"),
    *("CPU_PADDED_TOKENS_MAX", "WASTE_MAX", "PACKED_QUERIES_MAX", "ZSTD_REST_MAX"),
    *("TRIAL_RUNS_MAX", "STEPS_MAX", "_FAR_TOKENS_MAX", "_WINDOW_TOKENS_MAX", "ANSWER_TOKENS_MAX"),
}
RIDDLE = re.compile(
    r"(?:It|Its|They|Them|Their|He|She)\b|One \w+'s[.;]|One of (?:them|each)\b"
    r"|(?:How|Where|What|Who|Whom) (?:it|they|one|them)\b"
)
# Phrases of translated English; plain ones say who does what.
TRANSLATED = re.compile(
    r"\b(?:nobody|somebody|whoever|whomever|(?:comes?|came) to nothing|lets? go of|as ever|of late"
    r"|for good|(?:go|goes|going|gone|went) on with|(?:is|are) not to be had)\b",
    re.IGNORECASE,
)
# Words that make riddles of tests' names, which have a noun of the field as subject.
RIDDLE_WORDS = {
    *("anew", "asked", "nobody", "said", "says", "somebody", "tells", "told"),
    *("whatever", "who", "whoever", "whom"),
}
TEST_NAME_CHARS_MAX = 80
SPOKEN_BY_MODELS = {"router/cli/demo/demo_script.py"}  # texts of agents, not of the product
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
KEPT_IN_BYTES = re.compile(r'on_wire\("\w+"\)')
WRITING_MODE = re.compile(r"(?=.*[wax+])[rwaxbt+]{1,4}")


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the root, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module = field(repr=False)

    def at(self, node: ast.AST, complaint: str) -> str:
        return f"{self.path}:{node.lineno}: {complaint}"


def parse(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text, path))


@cache
def read(path: Path) -> Source:
    return parse(path.relative_to(ROOT).as_posix(), path.read_text())


def sources(*folders: str) -> list[Source]:
    return [read(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.fixture(scope="module", autouse=True)
def clear_parsed_trees() -> Iterator[None]:
    """Release the parsed trees after the last rule."""
    yield
    read.cache_clear()


def functions(source: Source) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, node.end_lineno - node.lineno + 1


def called_name(call: ast.Call) -> str:
    """Return `open` for `open(…)` and `os.open` for `os.open(…)`, else the last attribute."""
    return ast.unparse(call.func)


def calls(source: Source) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield node, called_name(node)


def long_file(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > FILE_LINES_MAX:
        yield f"{source.path}: {lines} lines, at most {FILE_LINES_MAX}"


def long_function(source: Source) -> Iterator[str]:
    for node, lines in functions(source):
        if lines > FUNCTION_LINES_MAX:
            yield source.at(node, f"{node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}")


def code_from_data(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
        else:
            continue
        for module in modules:
            if RUNS_CODE & set(module.split(".")):
                yield source.at(node, f"imports {module}")
    for call, name in calls(source):
        if name in {"eval", "exec", "__import__"}:
            yield source.at(call, f"calls {name}")


def dispatch_by_name(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        subject = getattr(node, "value", None)
        if (
            isinstance(node, ast.Subscript | ast.Attribute)
            and isinstance(subject, ast.Call)
            and called_name(subject) in {"globals", "vars", "locals"}
        ):
            yield source.at(node, f"looks a name up in {called_name(subject)}()")


def seeded_hash(source: Source) -> Iterator[str]:
    """Python's hash differs from process to process; only __hash__ may use it."""
    allowed = {
        id(inner)
        for node, _ in functions(source)
        if node.name == "__hash__"
        for inner in ast.walk(node)
    }
    for call, name in calls(source):
        if name == "hash" and id(call) not in allowed:
            yield source.at(call, "calls hash()")


def opens_to_write(call: ast.Call, name: str) -> bool:
    """Return whether `call` opens a file for writing, as far as its text shows."""
    if name == "os.open":
        return bool(WRITING_FLAG.search(ast.unparse(call)))
    method = "." in name and name != "io.open"
    modes = call.args[:1] if method else call.args[1:2]
    modes += [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    if not all(isinstance(mode, ast.Constant) for mode in modes):
        return not method  # a computed mode; of a method, the first argument is often a path
    return any(WRITING_MODE.fullmatch(str(mode.value)) for mode in modes)


def bare_write(source: Source) -> Iterator[str]:
    """In node/ a file appears only by the publish of posix_disk: fsync, rename, directory."""
    if not source.path.startswith("node/") or source.path == WRITES_FILES:
        return
    for call, name in calls(source):
        last = name.rsplit(".", 1)[-1]
        opens = last == "open" and opens_to_write(call, name)
        if opens or last in WRITING_CALLS:
            yield source.at(call, f"{name}(…) writes a file; only {WRITES_FILES} may")


def file_in_pure_code(source: Source) -> Iterator[str]:
    """In fabric, only the room `hosting` opens files; import contracts cover the rest."""
    if source.path.startswith("fabric/hosting/"):
        return
    for call, name in calls(source):
        if name in {"open", "input", "print"}:
            yield source.at(call, f"{name}(…) is I/O; fabric is pure but for fabric/hosting")


def no_docstring(source: Source) -> Iterator[str]:
    if not ast.get_docstring(source.tree):
        yield f"{source.path}: the module has no docstring"


def riddle(source: Source) -> Iterator[str]:
    """A docstring must not begin with a pronoun: tools show it without its file's own."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if RIDDLE.match(text):
                yield source.at(node, f"begins with a pronoun: {text.splitlines()[0]}")


def loose_end(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if LOOSE_END.search(line):
            yield f"{source.path}:{number}: {line.strip()}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node):
            yield source.at(node, "raises NotImplementedError")


def retired_word(source: Source) -> Iterator[str]:
    """Report retired words in names, comments and texts; names of fields in bytes stay."""
    for number, line in enumerate(source.text.splitlines(), 1):
        for word in WORD.findall(KEPT_IN_BYTES.sub("", line)):
            one = word.lower()
            better = RETIRED.get(one) or RETIRED.get(one.removesuffix("s"))
            if better is not None:
                yield f"{source.path}:{number}: {word!r}; the field says {better}"


def translated_phrase(source: Source) -> Iterator[str]:
    """Report phrases of translated English in names, comments and texts alike."""
    if source.path in SPOKEN_BY_MODELS:
        return
    for number, line in enumerate(source.text.splitlines(), 1):
        for phrase in TRANSLATED.findall(line):
            yield f"{source.path}:{number}: {phrase!r}: say which part does what"


def riddle_in_test_name(source: Source) -> Iterator[str]:
    """Report tests whose names a stranger must guess."""
    for node, _ in functions(source):
        words = node.name.split("_")
        if words[0] != "test":
            continue
        if RIDDLE_WORDS.intersection(words):
            yield source.at(node, f"{node.name}: name the tested noun, a verb and the condition")
        if len(node.name) > TEST_NAME_CHARS_MAX:
            yield source.at(node, f"{node.name}: over {TEST_NAME_CHARS_MAX} characters")


def limit_elsewhere(source: Source) -> Iterator[str]:
    """Bounds of queues, bodies, headers and loops are named in a package's limits.py."""
    if source.path.count("/") == 1 and source.path.endswith("/limits.py"):
        return
    for node in source.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = ast.unparse(target)
            numbers = (n for n in ast.walk(node.value) if isinstance(n, ast.Constant))
            if name.endswith("_MAX") and name not in NO_LIMITS and any(numbers):
                yield source.at(node, f"{name} belongs in {source.path.split('/')[0]}/limits.py")


RULES = {
    long_file: EVERYTHING,
    long_function: EVERYTHING,
    code_from_data: PRODUCT,
    dispatch_by_name: PRODUCT,
    seeded_hash: PRODUCT,
    bare_write: ("node",),
    file_in_pure_code: ("fabric",),
    no_docstring: PRODUCT,
    riddle: PRODUCT,
    loose_end: EVERYTHING,
    retired_word: PRODUCT,
    riddle_in_test_name: ("tests",),
    translated_phrase: PRODUCT,
    limit_elsewhere: ("node", "router"),
}

DOC = '"""Doc."""\n'
BREAKS = [
    (long_file, "fabric/x.py", "x = 1\n" * (FILE_LINES_MAX + 1)),
    (long_function, "fabric/x.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
    (code_from_data, "node/x.py", "import pickle"),
    (code_from_data, "node/x.py", "def f():\n    from ray import cloudpickle"),
    (code_from_data, "node/x.py", "eval('1')"),
    (dispatch_by_name, "node/x.py", "globals()['x']()"),
    (dispatch_by_name, "node/x.py", "globals().get('x')()"),
    (seeded_hash, "fabric/x.py", "key = hash('x')"),
    (bare_write, "node/x.py", "open('x', 'w')"),
    (bare_write, "node/x.py", "open('x', mode='ab')"),
    (bare_write, "node/x.py", "with open('x', 'r+b') as f: pass"),
    (bare_write, "node/x.py", "Path('x').open('wb')"),
    (bare_write, "node/x.py", "Path('x').write_bytes(b'')"),
    (bare_write, "node/x.py", "os.open('x', os.O_CREAT)"),
    (bare_write, "node/x.py", "open('x', mode)"),
    (file_in_pure_code, "fabric/net/x.py", "open('x')"),
    (no_docstring, "fabric/x.py", "x = 1"),
    (riddle, "fabric/x.py", 'class X:\n    """One node\'s; lives on its event loop."""'),
    (riddle, "fabric/x.py", 'def f():\n    """It, or nothing."""'),
    (riddle, "fabric/x.py", 'class X:\n    """Where one node finds them."""'),
    (loose_end, "fabric/x.py", "x = 1  # TOD" + "O: y"),
    (loose_end, "fabric/x.py", "raise NotImplementedError"),
    (retired_word, "node/x.py", "class DrawnToken: pass"),
    (retired_word, "node/x.py", "BEAT_S = 1"),
    (retired_word, "node/x.py", "room.seats = 1"),
    (retired_word, "router/x.py", "x = 1  # where the agent's landing is awaited"),
    (retired_word, "router/x.py", "log.debug('no beat from %s', name)"),
    (riddle_in_test_name, "tests/test_x.py", "def test_what_is_folded_is_told(): ..."),
    (riddle_in_test_name, "tests/test_x.py", f"async def test_{'owner_wins_' * 8}(): ..."),
    (translated_phrase, "node/x.py", 'def f():\n    """Tell nobody of the move."""'),
    (translated_phrase, "router/x.py", 'message = f"the move came to nothing: {reason}"'),
    (translated_phrase, "fabric/x.py", "x = 1  # the turn goes on with its cache"),
    (limit_elsewhere, "node/x.py", "QUEUE_MAX = 1_024"),
    (limit_elsewhere, "router/x.py", "_BODY_BYTES_MAX: Final = 2 * MIB"),
]

KEEPS = [
    (long_file, "fabric/x.py", "x = 1\n" * FILE_LINES_MAX),
    (long_function, "fabric/x.py", "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1)),
    (code_from_data, "node/x.py", "import json\nmodel.eval()\nmx.eval(x)\nre.compile('x')"),
    (dispatch_by_name, "node/x.py", "REGISTRY['x']()"),
    (seeded_hash, "fabric/x.py", "class A:\n    def __hash__(self): return hash(self.x)"),
    (bare_write, "node/x.py", "open('x')\nopen('x', 'rb')\nPath('x').open('rb')"),
    (bare_write, "node/x.py", "os.open('x', os.O_RDONLY | os.O_NOFOLLOW)\nself.disk.open(name)"),
    (bare_write, "node/x.py", "self.disk.open('agents')\nos.fdopen(3, 'wb')"),
    (bare_write, "node/store/posix_disk.py", "os.open('x', os.O_CREAT)\nopen('x', 'wb')"),
    (bare_write, "router/x.py", "open('x', 'w')"),
    (file_in_pure_code, "fabric/net/x.py", "_ENVELOPE.open(raw)"),
    (file_in_pure_code, "fabric/hosting/x.py", "open('x')"),
    (no_docstring, "fabric/x.py", DOC),
    (riddle, "fabric/x.py", 'class X:\n    """Records of one node\'s agents. It, too."""'),
    (loose_end, "fabric/x.py", "x = 'methods to do'"),
    (retired_word, "fabric/x.py", "arrivals = HEARTBEAT_S  # of things that think, outstanding"),
    (riddle_in_test_name, "tests/test_x.py", "def test_owner_wins(): ...\ndef who(): ..."),
    (translated_phrase, "fabric/x.py", "lateness = goes_on  # within a good body"),
    (limit_elsewhere, "node/x.py", "LINKS_MAX: Final = PEERS_MAX * ADDRESSES_MAX\nWAIT_S = 3.0"),
    (retired_word, "fabric/x.py", 'sampled: int = field(metadata=on_wire("drawn"))'),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tree_follows_rule(rule):
    assert [complaint for source in sources(*RULES[rule]) for complaint in rule(source)] == []


@pytest.mark.parametrize(("rule", "path", "text"), BREAKS)
def test_rule_reports_violation(rule, path, text):
    assert len(list(rule(parse(path, text)))) >= 1


@pytest.mark.parametrize(("rule", "path", "text"), KEEPS)
def test_rule_accepts_correct_code(rule, path, text):
    assert list(rule(parse(path, text))) == []


def test_every_rule_has_a_good_and_a_bad_sample():
    assert {rule for rule, *_ in BREAKS} == {rule for rule, *_ in KEEPS} == set(RULES)


def test_report_files_and_functions_near_their_limit(capsys):
    """Report files and functions over the wished size; nothing fails here."""
    files, long_ones = [], []
    for source in sources(*EVERYTHING):
        if (lines := len(source.text.splitlines())) > FILE_LINES_WISHED:
            files.append(f"{source.path} ({lines} lines)")
        for node, lines in functions(source):
            if lines > FUNCTION_LINES_WISHED:
                long_ones.append(source.at(node, f"{node.name} ({lines} lines)"))

    if files or long_ones:
        with capsys.disabled():
            print(f"\ntidy: over {FILE_LINES_WISHED} or {FUNCTION_LINES_WISHED} lines:")
            print(*(f"  {line}" for line in files + long_ones), sep="\n")
    assert sources(*PRODUCT), "no source was found"


def homonyms(files: list[Source]) -> list[str]:
    """Name the classes that two files of the product define."""
    found: dict[str, list[str]] = {}
    for source in files:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(source.path)
    return [f"{name}: {', '.join(paths)}" for name, paths in found.items() if len(paths) > 1]


def test_class_names_are_unique():
    assert homonyms(sources(*PRODUCT)) == []


def test_duplicate_class_name_is_reported():
    files = [parse("node/a.py", "class Room: ..."), parse("router/b.py", "class Room: ...")]
    assert homonyms(files) == ["Room: node/a.py, router/b.py"]
