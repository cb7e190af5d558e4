"""Read the English prose of the installed Python, split into training and held-out documents.

A document is one topic of ``pydoc_data.topics`` or the docstrings and comments of one module, in
source order, so that a long window stays on one subject. Nothing of it is copied into the repo.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

HELD_OUT_PERCENT = 8
SHINGLE_WORDS = 10
# Not Python's own, or read through its topics.
_SKIPPED = {"site-packages", "__pycache__", "pydoc_data"}
# Many installations come without their tests, so these may only ever be trained on.
_TESTS = {"test", "tests", "idle_test"}
_NOTICE = re.compile(
    r"copyright|permission .{0,40}grant|warrant(y|ies)|all rights reserved", re.IGNORECASE
)
_COMMENT = re.compile(r"^\s*#(?![!:]|\s*-\*-) ?(.*)$")
_DEFS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Document(NamedTuple):
    """Name one piece of prose and hold its text."""

    name: str
    text: str


def is_held_out(name: str) -> bool:
    """Decide from its name alone whether a document is never trained on."""
    if _TESTS & set(name.split(".")):
        return False
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"prose-split").digest()
    return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT


def _words(text: str) -> list[str]:
    """Return the lower-case words of a text, punctuation dropped."""
    return re.findall(r"[a-z0-9_]+", text.lower())


def shingles(text: str) -> set[int]:
    """Return a hash of every run of ``SHINGLE_WORDS`` words."""
    words = _words(text)
    runs = (words[i : i + SHINGLE_WORDS] for i in range(len(words) - SHINGLE_WORDS + 1))
    # Only compared inside one process, so Python's own hash is good enough.
    return {hash(tuple(run)) for run in runs}


def _is_prose(paragraph: str) -> bool:
    """Accept paragraphs that are mostly letters and no legal notice."""
    letters = sum(c.isalpha() or c.isspace() for c in paragraph)
    return letters >= 0.75 * len(paragraph) and not _NOTICE.search(paragraph)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the prose paragraphs of a text, trailing blanks removed."""
    lines = "\n".join(line.rstrip() for line in text.expandtabs().splitlines())
    for paragraph in re.split(r"\n{2,}", lines):
        if paragraph.strip() and _is_prose(paragraph):
            yield paragraph


def _docstrings(tree: ast.Module, name: str) -> Iterator[tuple[int, int, str]]:
    """Yield (first line, last line, heading and text) of every docstring."""
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        node, path = stack.pop()
        for child in ast.iter_child_nodes(node):
            inner = getattr(child, "name", "") if isinstance(child, _DEFS) else ""
            stack.append((child, f"{path}.{inner}".strip(".") if inner else path))
        if not isinstance(node, _DEFS) or not node.body:
            continue
        doc, first = ast.get_docstring(node, clean=False), node.body[0]
        if doc:
            heading = path or name
            yield first.lineno, first.end_lineno or first.lineno, _titled(heading, doc)


def _titled(heading: str, doc: str) -> str:
    """Put a heading line over a docstring."""
    return f"{heading}\n{inspect.cleandoc(doc)}"


def _comments(source: str, docstring_lines: set[int]) -> Iterator[tuple[int, int, str]]:
    """Yield (first line, last line, text) of every block of whole-line comments."""
    block: list[str] = []
    lines = [*source.splitlines(), ""]
    for number, line in enumerate(lines, 1):
        match = None if number in docstring_lines else _COMMENT.match(line)
        if match:
            block.append(match.group(1).lstrip("#"))
            continue
        text = "\n".join(block).strip()
        # Shorter ones are mostly section rules and commented-out code.
        if len(_words(text)) >= 8:
            yield number - len(block), number - 1, text
        block = []


def module_prose(source: str, name: str) -> str:
    """Return the docstrings and comments of a module in source order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    docs = list(_docstrings(tree, name))
    docstring_lines = {line for first, last, _ in docs for line in range(first, last + 1)}
    parts = sorted([*docs, *_comments(source, docstring_lines)])
    return "\n\n".join(text for _, _, text in parts)


def _module_files() -> Iterator[tuple[str, Path]]:
    """Yield (dotted name, path) of every standard-library source file, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not _SKIPPED & set(parts) and not parts[0].startswith(("config-", "_sysconfigdata")):
            yield ".".join(p for p in parts if p != "__init__"), path


def _raw_documents(*, held_out: bool, every: int = 1) -> Iterator[Document]:
    """Yield one side of the split as found, topics first."""
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        name = f"topic:{topic}"
        if is_held_out(name) == held_out:
            yield Document(name, topics[topic])
    chosen = [(name, path) for name, path in _module_files() if is_held_out(name) == held_out]
    for name, path in chosen[::every]:
        try:
            yield Document(name, module_prose(path.read_text(encoding="utf-8"), name))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue  # Python's own tests carry files that are broken on purpose.


def _clean(raw: Iterable[Document], forbidden: set[int]) -> Iterator[Document]:
    """Drop non-prose, repeated paragraphs, and any that share a word run with ``forbidden``."""
    seen: set[str] = set()
    for name, text in raw:
        kept: list[str] = []
        for paragraph in _paragraphs(text):
            words = _words(paragraph)
            key = " ".join(words)
            if len(words) >= 6 and key in seen:
                continue
            if forbidden and not forbidden.isdisjoint(shingles(paragraph)):
                continue
            seen.add(key)
            kept.append(paragraph)
        if sum(map(len, kept)) >= 80:
            yield Document(name, "\n\n".join(kept) + "\n")


@cache
def held_out_documents() -> tuple[Document, ...]:
    """Return the documents that are never trained on."""
    return tuple(_clean(_raw_documents(held_out=True), set()))


def training_documents(every: int = 1) -> list[Document]:
    """Return the training documents, without any ten-word run of the held-out ones.

    A larger ``every`` reads the topics and that share of the modules only.
    """
    forbidden: set[int] = set()
    for document in held_out_documents():
        # By paragraph, as the filter looks: runs across paragraph ends are in no text.
        for paragraph in _paragraphs(document.text):
            forbidden |= shingles(paragraph)
    return list(_clean(_raw_documents(held_out=False, every=every), forbidden))


def digest(documents: Iterable[Document]) -> str:
    """Return a short digest of documents, to tell one Python's text from another's."""
    state = hashlib.blake2b(digest_size=16)
    for name, text in documents:
        state.update(f"{name}\0{text}\0".encode("utf-8", "surrogatepass"))
    return state.hexdigest()
