"""Error codes in the source, each with the statuses that clients get with it.

Read from the syntax trees: `code=` of a call, `code = …` of a class, and the arguments of the
functions that refuse a request. Codes of the simulator and the commands are left out: only
commands print them.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import Any

from fabric.errors import FabricError, FatalError, HungUpError, RetryElsewhereError
from fabric.net.wire import REFUSAL_CODES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fabric", "node", "router")
LEFT_OUT = ("router/simulate/", "router/cli/")
# Functions that refuse a request, and the position of the code among their arguments.
REFUSERS = {"refuse": 2, "_refuse": 1, "_stop": 1, "refusal": 1}
KINDS = {"WordIn", "Tagged"}  # types of values in bodies, which refuse others by their own code
ID_PARSERS = {"_parse", "_digest"}  # the code is "invalid_" and their third argument
OF_PATHS = "router.http.errors"  # maps statuses of unknown paths and methods to codes
CODE = re.compile(r"[a-z][a-z0-9_]{2,39}")

Found = Iterator[tuple[str, int | None]]  # a code, and its status where the call names one


@cache
def error_codes() -> dict[str, frozenset[int]]:
    """Return the statuses of every code; empty where no call names a class with a status."""
    statuses: defaultdict[str, set[int]] = defaultdict(set)
    for path in sources():
        for code, status in codes_in(ast.parse(path.read_text()), module_of(path)):
            statuses[code] |= set() if status is None else {status}
    for code in REFUSAL_CODES:  # the data plane's codes, in a table
        statuses.setdefault(code, set())
    return {code: frozenset(found) for code, found in statuses.items()}


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.relative_to(ROOT).as_posix().startswith(LEFT_OUT):
                yield path


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def codes_in(tree: ast.Module, module: str) -> Found:
    """Yield the codes of one file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from _of_class(node, module)
        elif isinstance(node, ast.Call):
            yield from _of_call(node, module)
        elif isinstance(node, ast.Tuple):
            yield from _of_refusal(node)
        elif isinstance(node, ast.Dict) and module == OF_PATHS:
            yield from _of_statuses(node)


def _of_class(node: ast.ClassDef, module: str) -> Found:
    """Yield `code = "…"` of an error's class, or of a field with a default."""
    for line in node.body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        if isinstance(target, ast.Name) and target.id == "code":
            yield from _each(getattr(line, "value", None), module, _status_of(node.name, module))


def _of_call(node: ast.Call, module: str) -> Found:
    called = ast.unparse(node.func).rsplit(".", 1)[-1]
    for keyword in node.keywords:
        if keyword.arg == "code":
            yield from _each(keyword.value, module, _status_of(called, module))
    place = REFUSERS.get(called)
    if place is not None and len(node.args) > place:
        code_argument = node.args[0]
        named = code_argument.value if isinstance(code_argument, ast.Constant) else None
        status = named if isinstance(named, int) else HTTPStatus.BAD_REQUEST
        yield from _each(node.args[place], module, status)
    if called in ID_PARSERS and module == "fabric.ids" and isinstance(node.args[2], ast.Constant):
        yield f"invalid_{node.args[2].value.replace(' ', '_')}", HTTPStatus.BAD_REQUEST


def _of_refusal(node: ast.Tuple) -> Found:
    """Yield the code of `(400, "invalid_http", "…")`."""
    values = [each.value if isinstance(each, ast.Constant) else None for each in node.elts]
    if len(values) == 3 and isinstance(values[0], int) and values[0] in range(400, 600):
        yield from _each(node.elts[1], "", values[0])


def _of_statuses(node: ast.Dict) -> Found:
    """Yield the codes of `{HTTPStatus.NOT_FOUND: "unknown_url"}`."""
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Attribute) and ast.unparse(key.value) == "HTTPStatus":
            yield from _each(value, "", HTTPStatus[key.attr])


def _each(value: ast.expr | None, module: str, status: int | None) -> Found:
    for text in _texts(value, module):
        if CODE.fullmatch(text):
            yield text, status


def _texts(value: ast.expr | None, module: str) -> Iterable[str]:
    """Return the possible texts of an expression: constants, names of constants, alternatives."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return [value.value]
    if isinstance(value, ast.IfExp):
        return [*_texts(value.body, module), *_texts(value.orelse, module)]
    if isinstance(value, ast.Name) and module:
        named = getattr(import_module(module), value.id, None)
        return [named] if isinstance(named, str) else []
    return []


def _status_of(name: str, module: str) -> int | None:
    """Return the status that clients get with an error of a class; None for other names."""
    if name in KINDS:
        return HTTPStatus.BAD_REQUEST
    kind: Any = getattr(import_module(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, FabricError)):
        return None
    if issubclass(kind, FatalError | HungUpError):  # the process ends, or the client has left
        return None
    if issubclass(kind, RetryElsewhereError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return int(kind.status)
