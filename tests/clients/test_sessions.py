"""Sessions of each coding agent and of a chat UI, which continue and stay warm.

A session reads a screenshot, offers a web search, is interrupted, continues after a restart of the
fabric, and outgrows the context. The programs come from npm's and Python's registries.
"""

import pytest

from tests.clients.judging import becomes_free
from tests.clients.obedience import ENDLESS, GREETING
from tests.clients.open_webui import OPEN_WEBUI
from tests.clients.session_programs import CODING_AGENTS
from tests.clients.sessions import (
    CONTEXT_TOKENS,
    FIRST,
    LOOK,
    PARTIAL_TOKENS,
    SEARCH,
    WARM_MIN,
    Session,
    paste,
    screenshot,
    session_fabric,
)

pytestmark = [pytest.mark.nightly, pytest.mark.slow]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with session_fabric(tmp_path_factory.mktemp("fabric")) as instance:
        yield instance


@pytest.fixture
def session(served):
    rig, seen = served
    seen.bodies.clear()
    seen.dropped.clear()
    return Session(rig, seen)


@pytest.mark.parametrize("program", [*CODING_AGENTS, OPEN_WEBUI], ids=str)
def test_session_continues_and_stays_warm(session, program, tmp_path):
    rig, fabric = session.rig, session.rig.fabric
    picture = tmp_path / "work" / "shot.png"
    picture.parent.mkdir()
    picture.write_bytes(screenshot())
    with program.home(fabric.url, tmp_path) as home:

        def ask(phase, question, picture=None):
            with session.phase(phase):
                shown = home.ask(question, picture)
            assert GREETING in shown or "It says: " in shown, shown[-2_000:]
            assert "</think>" not in shown

        ask("plain", FIRST)
        ask("picture", f"{LOOK} {picture} now.", picture)
        assert session.showed_picture()
        ask("search", SEARCH)
        assert program.hosted is None or session.offered(program.hosted)

        before = len(rig.model.turns)
        with session.phase("interrupted") as stopped:
            home.interrupt(ENDLESS, lambda: rig.model.is_answering(before))
            assert becomes_free(rig)
        assert any(turn.sequence.cancelled.is_set() for turn in stopped)
        ask("resumed", "Say hello again.")

        fabric.restart_all()
        ask("restarted", "Say hello once more.")

        tokens, number = session.figures[-1].prompt_tokens, 0
        while tokens <= CONTEXT_TOKENS:
            ask("overflow", paste(number))
            tokens, number = tokens + paste_tokens(fabric), number + 1
        print(f"{program}: {number} long texts; the fabric dropped {session.seen.dropped} messages")
        ask("last", "Say hello at last.")
    judge(session, program)


def judge(session, program):
    """Check that no request recomputes cached tokens, and that all but a few reuse 90 %."""
    wrong = []
    for figure in session.figures:
        new = figure.phase in ("plain", "overflow")  # the first text and the long ones
        if figure.is_main and figure.lost_tokens > lost_max(figure):
            wrong.append(f"computed again: {figure}")
        if not figure.is_main or new or figure.phase in program.rewrites:
            continue
        if figure.warm < WARM_MIN:
            wrong.append(f"not warm: {figure}")
    for phase, why in program.rewrites.items():
        print(f"{program}: {phase} is not judged by its prompt: {why}")
    assert not wrong, "\n".join(wrong)
    assert not session.rig.model.disobeyed


def lost_max(figure):
    return (1 - WARM_MIN) * figure.common_tokens + PARTIAL_TOKENS


def paste_tokens(fabric):
    body = {"model": fabric.model_name, "messages": [{"role": "user", "content": paste(0)}]}
    answer = fabric.http.post("/v1/messages/count_tokens", json=body)
    return answer.json()["input_tokens"]
