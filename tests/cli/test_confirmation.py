"""Confirmation of irreversible commands: on a terminal only, by the exact word only."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

from tests.cli.fake_fabric import ANSWERS
from tests.support.pseudo_terminal import TerminalProgram
from tests.support.typed import Keyboard, type_words

ROOT = Path(__file__).resolve().parents[2]
ERASED = ("DELETE", "/v1/agents/mira", None)
RUN = "/v1/scenarios/debate"
FINAL = ["erase mira", "resume FILE", "restore FOLDER", "scenario cancel RUN", "uninstall"]


@pytest.fixture
def terminal(fabric, tmp_path):
    """`macfabric erase mira` in a terminal of its own."""
    argv = [sys.executable, "-m", "router.cli.main", "erase", "mira", "--url", fabric.url]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    with contextlib.closing(TerminalProgram(argv, environment, tmp_path)) as program:
        assert program.sees(["Type yes to erase mira on every node:"]), program.raw
        assert fabric.requests == []
        yield program


@pytest.mark.parametrize(
    ("typed", "status"),
    [("yes\n", 0), ("y\n", 1), ("mira\n", 1), ("\n", 1), ("\x04", 1), ("\x03", 130)],
    ids=["yes", "y", "id", "nothing", "end", "interrupt"],
)
def test_erasure_needs_yes_typed_on_a_terminal(terminal, fabric, typed, status):
    terminal.type(typed)
    assert terminal.wait() == status, terminal.raw
    assert fabric.requests == ([ERASED] if status == 0 else [])
    assert "Traceback" not in terminal.raw
    assert ("nothing was changed" in terminal.shown) == (status == 1)


def test_erasure_without_terminal_or_with_yes_needs_no_word(run, fabric, monkeypatch):
    erase = ("erase", "mira", "--url", fabric.url)
    assert run(*erase)[0] == 0  # no terminal
    type_words(monkeypatch, "no\n")
    assert run(*erase, "--yes")[0] == 0
    assert run(*erase)[0] == 1
    monkeypatch.undo()
    # Standard error is a file, where the user could not read the question.
    monkeypatch.setattr(sys, "stdin", Keyboard("no\n"))
    assert run(*erase)[0] == 0
    assert fabric.requests == [ERASED] * 3


@pytest.mark.parametrize(("state", "is_asked"), [("running", False), ("ended", True)])
def test_deletion_of_an_ended_run_needs_yes_typed(run, fabric, monkeypatch, state, is_asked):
    monkeypatch.setitem(ANSWERS, ("GET", RUN), {"id": "debate", "state": state})
    monkeypatch.setitem(ANSWERS, ("DELETE", RUN), {"id": "debate", "deleted": is_asked})
    type_words(monkeypatch, "no\n")
    status, _, err = run("scenario", "cancel", "debate", "--url", fabric.url)
    assert (status, "delete run debate" in err) == (int(is_asked), is_asked)
    assert [verb for verb, *_ in fabric.requests] == (["GET"] if is_asked else ["GET", "DELETE"])


@pytest.mark.parametrize("command", FINAL)
def test_help_of_final_command_names_the_loss_and_yes(run, command):
    names = [word for word in command.split() if word.islower() and word != "mira"]
    shown = " ".join(run(*names, "--help")[1].split())
    assert "--yes" in shown
    assert any(words in shown for words in ("cannot be undone", "are lost"))
