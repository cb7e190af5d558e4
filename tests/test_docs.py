"""Documents: short ones stay short, and all that they refer to exists.

Each rule is a function from a document to its complaints, and is tried on a sample that breaks it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINES_MAX = {"README.md": 110, "ARCHITECTURE.md": 220}
PRODUCT = ("fabric", "node", "router")

HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r"[a-z]+://|mailto:")
# `node/turn/turn.py`, `tests/sim`, `benchmarks/models/`; then a bare `turn.py`, wherever it is.
IN_TREE = re.compile(
    r"(?<![\w./~-])(?:fabric|node|router|tests|benchmarks|docs|\.ci)/[\w./*-]*[\w/*]"
)
BARE = re.compile(r"(?<![\w./*-])\w+\.py\b")


@dataclass(frozen=True)
class Document:
    """One Markdown file: its path from the root and its text."""

    path: str
    text: str


@cache
def documents() -> tuple[Document, ...]:
    paths = [ROOT / name for name in LINES_MAX] + sorted((ROOT / "docs").glob("*.md"))
    return tuple(Document(p.relative_to(ROOT).as_posix(), p.read_text()) for p in paths)


@cache
def module_names() -> frozenset[str]:
    folders = (*PRODUCT, "tests", "benchmarks")
    return frozenset(path.name for folder in folders for path in (ROOT / folder).rglob("*.py"))


def anchors(text: str) -> set[str]:
    """Spell each heading as GitHub does in links."""
    titles = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def too_long(document: Document) -> Iterator[str]:
    lines, limit = len(document.text.splitlines()), LINES_MAX.get(document.path)
    if limit is not None and lines > limit:
        yield f"{document.path}: {lines} lines, at most {limit}: move detail into docs/"


def dead_link(document: Document) -> Iterator[str]:
    for link in LINK.findall(document.text):
        if ELSEWHERE.match(link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / document.path).parent / name if name else ROOT / document.path
        has_headings = target.suffix == ".md" and target.is_file()  # pictures have none
        text = document.text if not name else target.read_text() if has_headings else ""
        if name and not target.exists():
            yield f"{document.path}: {link} does not exist"
        elif anchor and anchor not in anchors(text):
            yield f"{document.path}: {link} names no heading"


def missing_file(document: Document) -> Iterator[str]:
    for name in IN_TREE.findall(document.text):
        found = any(ROOT.glob(name)) if "*" in name else (ROOT / name).exists()
        if not found:
            yield f"{document.path}: {name} does not exist"
    for name in BARE.findall(document.text):
        if name not in module_names():
            yield f"{document.path}: there is no {name} anywhere"


# Documents that a flow links to are not files of it.
# Phrases of translated English, outside of code.
TRANSLATED = re.compile(
    r"\b(?:nobody|somebody|whoever|(?:comes?|came) to nothing|lets? go of|as ever|of late|for good"
    r"|(?:go|goes|gone|went) on with|(?:is|are) not to be had)\b",
    re.IGNORECASE,
)
INLINE_CODE = re.compile(r"`[^`]*`")


def translated_phrase(document: Document) -> Iterator[str]:
    text = INLINE_CODE.sub("", FENCE.sub("", document.text))
    for phrase in TRANSLATED.findall(text):
        yield f"{document.path}: {phrase!r}: say which part does what"


LINKED = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
RULES = (too_long, dead_link, missing_file, translated_phrase)

README = "README.md"
BREAKS = [
    (too_long, README, "line\n" * 111),
    (too_long, "ARCHITECTURE.md", "line\n" * 221),
    (dead_link, README, "see [this](docs/nowhere.md)"),
    (dead_link, "docs/cli.md", "see [this](README.md), which is one folder up"),
    (dead_link, README, "see [this](docs/security.md#nowhere)"),
    (dead_link, README, "# Here\nsee [this](#there)"),
    (missing_file, README, "see `node/turn/nowhere.py`"),
    (missing_file, README, "in `node/nowhere/`"),
    (missing_file, README, "see `fabric/nowhere_*.py`"),
    (missing_file, README, "```\nclaim and plan (nowhere.py)\n```"),
    (translated_phrase, "docs/cli.md", "A move that came to nothing is repeated."),
]
KEEPS = [
    (translated_phrase, "docs/cli.md", "not `nobody`\n```\nnobody\n```\n"),
    (too_long, README, "line\n" * 110),
    (too_long, "docs/format.md", "line\n" * 1_000),
    (dead_link, README, "[a](docs/security.md#the-keys), [b](https://example.org/x), [c](LICENSE)"),
    (dead_link, "docs/cli.md", "# Here, `there`!\n[up](../README.md) and [down](#here-there)"),
    (
        missing_file,
        README,
        "`node/turn/turn.py`, `tests/sim`, `node/mlx/`, `docs/*.md`, test_docs.py",
    ),
    (missing_file, README, "`~/macfabric/app/fabric/x`, `DIR/nodes/NODE`"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_documents_follow_rule(rule):
    assert list(chain.from_iterable(rule(document) for document in documents())) == []


@pytest.mark.parametrize(("rule", "path", "text"), BREAKS)
def test_rule_reports_violation(rule, path, text):
    assert len(list(rule(Document(path, text)))) == 1


@pytest.mark.parametrize(("rule", "path", "text"), KEEPS)
def test_rule_accepts_correct_text(rule, path, text):
    assert list(rule(Document(path, text))) == []


def test_every_rule_has_a_good_and_a_bad_sample():
    assert {rule for rule, *_ in BREAKS} == {rule for rule, *_ in KEEPS} == set(RULES)


def test_architecture_lists_every_package():
    """ARCHITECTURE.md lists every room."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = [
        path.parent.relative_to(ROOT)
        for package in PRODUCT
        for path in (ROOT / package).rglob("*/__init__.py")
    ]

    assert [r.as_posix() for r in rooms if f"`{PurePosixPath(r)}`" not in text] == []


@pytest.mark.parametrize(
    ("flow", "files_min"),
    [
        ("Cold request", 20),
        ("Warm restart", 12),
        ("Migration", 10),
        ("Directive", 6),
        ("Erasure", 8),
    ],
)
def test_flow_names_every_file_that_decides(flow, files_min):
    """Steps that fit a screen, each with its files; that these exist is a rule above."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    [section] = re.findall(
        rf"^\*\*{flow}\.?\*\*(.*?)(?=^\*\*|^## )", text, re.MULTILINE | re.DOTALL
    )

    assert len(set(IN_TREE.findall(section)) - LINKED) >= files_min
    assert 4 <= len(re.findall(r"^\d\. ", section, re.MULTILINE)) <= 8


def test_every_document_is_linked():
    linked = {
        ((ROOT / document.path).parent / link.partition("#")[0]).resolve()
        for document in documents()
        for link in LINK.findall(document.text)
        if not ELSEWHERE.match(link)
    }

    assert [d.path for d in documents() if d.path != README and ROOT / d.path not in linked] == []
