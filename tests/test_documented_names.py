"""Commands, settings, metrics, routes, codes and keys that any document names exist.

Each rule is a function from a document to its complaints, and is tried on a sample that breaks it.
"""

import re
from collections.abc import Iterator
from itertools import chain

import pytest

from tests.support.command_page import commands, options
from tests.support.documented_names import (
    PARAMETER,
    PREFIX,
    event_classes,
    metrics,
    routes,
    sections,
    settings,
    words,
)
from tests.test_docs import INLINE_CODE, Document, documents

# Pages for a task: every name of several words in them is one of the product.
TASKS = ("two-macs", "coding-agents", "chat-uis", "troubleshooting")
TASK_LINES_MAX = 150
FENCED = re.compile(r"^ *```.*?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"(?:node|router)\.[a-z][\w.]*")
METRIC = re.compile(rf"{PREFIX}[a-z_]+\*?")
ROUTE = re.compile(r"(GET|POST|DELETE|HEAD) (/(?:v1|metrics|health|openapi)[\w/{}.…-]*)")
WORDS = re.compile(r"[a-z]+(?:_[a-z0-9]+)+")
FILES = re.compile(r"\.(?:py|md|log|jsonl|key|pem|yaml)$")
OF_OTHERS = {  # settings of other programs that a page mentions
    *("env_key", "model_context_window", "proxy_read_timeout", "small_model", "wire_api"),
}
# In answers, but in no schema: a cause of `last_exit`, and a field of nodes that do not start.
VALUES = {"out_of_memory", "starts_again_in_s"}


def code_of(document: Document) -> Iterator[str]:
    """Yield the lines of fences, then each span of code in the text."""
    for block in FENCED.findall(document.text):
        yield from block.splitlines()
    for span in INLINE_CODE.findall(FENCED.sub("", document.text)):
        yield span.strip("`")


def unknown_command(document: Document) -> Iterator[str]:
    for code in code_of(document):
        found = re.match(r"(?:\S*/)?macfabric ((?!\[|-)\S.*)", code.strip())
        if found is not None:
            yield from _wrong_in(document.path, found[1].split("#")[0])


def _wrong_in(path: str, line: str) -> Iterator[str]:
    tokens = re.split(r"[\s\[\]|]+", line.replace("\\|", "|").strip())
    known = commands()
    name = next((" ".join(tokens[:n]) for n in (2, 1) if " ".join(tokens[:n]) in known), None)
    if name is None:
        if tokens[0] != "COMMAND" and not any(each.startswith(f"{tokens[0]} ") for each in known):
            yield f"{path}: there is no command {tokens[0]!r}"
        return
    own = tokens[: tokens.index("--")] if "--" in tokens else tokens
    for option in (token.split("=")[0] for token in own if token.startswith("--")):
        if option not in options(known[name]) and name != "bench":
            yield f"{path}: {name} has no option {option}"


def unknown_setting(document: Document) -> Iterator[str]:
    allowed = settings() | sections() | event_classes().keys()
    for code in code_of(document):
        if not re.fullmatch(rf"{SETTING.pattern}(?:: .*)?", code) or FILES.search(code):
            continue
        name = code.split(":")[0]
        if name not in allowed and not name.startswith("node.NODE"):
            yield f"{document.path}: there is no setting {name}"


def unknown_metric(document: Document) -> Iterator[str]:
    for name in METRIC.findall(document.text):
        stem = name.rstrip("*")
        fits = any(each.startswith(stem) for each in metrics())
        if not (fits if name.endswith("*") else {name, f"{name}_total"} & metrics()):
            yield f"{document.path}: there is no metric {name}"


def unknown_route(document: Document) -> Iterator[str]:
    known = {(method, PARAMETER.sub("ID", path)) for method, path in routes()}
    for code in code_of(document):
        for method, path in ROUTE.findall(code):
            plain = re.sub(r"^(/v1/\w+)/[A-Z]+\b|^(/v1/agents)/[\w.-]+", r"\1\2/ID", path).rstrip(
                "."
            )
            if "…" not in plain and (method, plain) not in known:
                yield f"{document.path}: there is no {method} {path}"


def unknown_word(document: Document) -> Iterator[str]:
    if document.path not in {f"docs/{name}.md" for name in TASKS}:
        return
    for span in INLINE_CODE.findall(FENCED.sub("", document.text)):
        code = span.strip("`")
        if WORDS.fullmatch(code) and code not in words() | OF_OTHERS | VALUES:
            yield f"{document.path}: {code} is no name of the product"


def long_task(document: Document) -> Iterator[str]:
    lines = len(document.text.splitlines())
    if document.path in {f"docs/{name}.md" for name in TASKS} and lines > TASK_LINES_MAX:
        yield f"{document.path}: {lines} lines, at most {TASK_LINES_MAX}"


RULES = (unknown_command, unknown_setting, unknown_metric, unknown_route, unknown_word, long_task)
PAGE = "docs/troubleshooting.md"
BREAKS = [
    (unknown_command, "run `macfabric agnts`"),
    (unknown_command, "```\n.venv/bin/macfabric agents --where\n```"),
    (unknown_command, "`macfabric config check FILE --fix`"),
    (unknown_setting, "set `node.hot_byte`"),
    (unknown_setting, "`router.tls.mod`"),
    (unknown_metric, "alert on `macfabric_node_upp`"),
    (unknown_route, "`GET /v1/agent`"),
    (unknown_word, "the code is `no_such_code`"),
    (long_task, "line\n" * (TASK_LINES_MAX + 1)),
]
KEEPS = [
    (unknown_command, "`macfabric COMMAND --help`, `macfabric launch claude -- --print-it`"),
    (unknown_command, "```\n.venv/bin/macfabric agents --why mira   # --no-option\n```"),
    (unknown_setting, "`node.hot_bytes: auto`, `node.memory`, `node.sampling`, `router.jsonl`"),
    (unknown_metric, "`macfabric_node_up`, `macfabric_link_*`, `macfabric_requests_total`"),
    (unknown_route, "`GET /v1/agents/ID/turns`, `POST /v1/agents/ID/…`"),
    (unknown_word, "`no_node_ready`, `hot_bytes`, `last_match`\n```\nno_such_code\n```"),
    (long_task, "line\n" * TASK_LINES_MAX),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_documents_follow_rule(rule):
    assert list(chain.from_iterable(rule(document) for document in documents())) == []


@pytest.mark.parametrize(("rule", "text"), BREAKS)
def test_rule_reports_violation(rule, text):
    assert len(list(rule(Document(PAGE, text)))) == 1


@pytest.mark.parametrize(("rule", "text"), KEEPS)
def test_rule_accepts_correct_text(rule, text):
    assert list(rule(Document(PAGE, text))) == []


def test_every_rule_has_a_good_and_a_bad_sample():
    assert {rule for rule, _ in BREAKS} == {rule for rule, _ in KEEPS} == set(RULES)


def test_task_pages_exist_and_state_their_purpose():
    """Below the title, one sentence that begins with what the page does."""
    pages = {document.path: document.text for document in documents()}
    for name in TASKS:
        first = pages[f"docs/{name}.md"].split("\n\n")[1]
        assert re.match(r"This page ", first), name
