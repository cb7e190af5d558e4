"""`macfabric chat`: one message, a conversation in the terminal, and failures."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import pytest

from router.cli import chat, terminal
from router.client.http_api import RefusedError
from tests.support.pseudo_terminal import TerminalProgram

ROOT = Path(__file__).resolve().parents[2]
PATH = "/v1/agents/mira/generate"
END = {
    "finish_reason": "stop",
    "prompt_tokens": 1200,
    "cached_tokens": 1100,
    "completion_tokens": 3,
}


def sse(name, **data):
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


ANSWER = [sse("reasoning", text="hm"), sse("text", text="otter "), sse("text", text="lantern\x1b"),
          sse("end", **END), b""]  # fmt: skip


@pytest.fixture
def typed(monkeypatch):
    """Type lines into a terminal; an exception among them is raised instead."""

    def type_lines(*lines):
        left = list(lines)

        def read(prompt):
            assert prompt == chat.PROMPT
            line = left.pop(0) if left else EOFError
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(chat, "input_is_terminal", lambda: True)
        monkeypatch.setattr(chat, "read_line", read)

    return type_lines


def test_prefill_is_shown_on_a_terminal_until_the_answer_begins(fabric, tmp_path):
    frames = fabric.streams[PATH] = [b": starting\n\n", b": prefill 512/1200\n\n"]
    argv = [sys.executable, "-m", "router.cli.main", "chat", "mira", "hello", "--url", fabric.url]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    with contextlib.closing(TerminalProgram(argv, environment, tmp_path)) as program:
        assert program.sees(["prefill", "512/1200"]), program.raw
        frames += ANSWER
        assert program.wait() == 0, program.raw
        assert "otter lantern" in program.shown


def test_text_argument_is_one_message(run, fabric):
    fabric.streams[PATH] = ANSWER
    status, out, err = run("chat", "mira", "The code is", "--max-tokens", "9", "--url", fabric.url)

    assert (status, out) == (0, "otter lantern\\x1b\n")
    assert "hm" in err
    assert "1,100 of 1,200 tokens reused" in err
    ((method, path, body),) = fabric.requests
    assert (method, path) == ("POST", PATH)
    assert body == {
        "messages": [{"role": "user", "content": "The code is"}],
        "stream": True,
        "max_tokens": 9,
    }


def test_json_has_the_whole_answer_on_one_line(run, fabric):
    fabric.streams[PATH] = ANSWER
    _, out, _ = run("chat", "mira", "The code is", "--json", "--url", fabric.url)
    row = json.loads(out)

    assert len(out.splitlines()) == 1
    assert (row["id"], row["text"], row["reasoning"]) == ("mira", "otter lantern\x1b", "hm")
    assert row["cached_tokens"] == 1100


def test_standard_input_is_one_message(run, fabric, monkeypatch):
    fabric.streams[PATH] = ANSWER
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    status, out, _ = run("chat", "mira", "--url", fabric.url)

    assert (status, out) == (0, "otter lantern\\x1b\n")
    assert fabric.requests[0][2]["messages"][0]["content"] == "two\nlines\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [("  \n", "there is no message"), ("x" * (chat.CHAT_INPUT_CHARS_MAX + 1), "has more than")],
    ids=["empty", "too long"],
)
def test_unusable_input_is_misuse(run, fabric, monkeypatch, text, why):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    status, _, err = run("chat", "mira", "--url", fabric.url)

    assert (status, fabric.requests) == (2, [])
    assert why in err


def test_lines_are_messages_of_one_agent_and_instructions_are_sent_once(run, fabric, typed):
    fabric.streams[PATH] = ANSWER
    typed("first", "", "second")
    status, out, err = run("chat", "mira", "--system", "Be brief.", "--url", fabric.url)

    assert status == 0
    assert out == "otter lantern\\x1b\n" * 2
    assert "`macfabric erase mira` removes it" in err
    sent = [[each["content"] for each in body["messages"]] for _, _, body in fabric.requests]
    assert sent == [["Be brief.", "first"], ["second"]]


def test_new_agent_gets_a_name(run, fabric, typed):
    typed()
    _, _, err = run("chat", "--url", fabric.url)
    _, _, again = run("chat", "--url", fabric.url)

    assert err.startswith("agent chat-")
    assert err.split(":")[0] != again.split(":")[0]


def test_failed_answer_does_not_end_the_conversation(run, fabric, typed):
    fabric.streams[PATH] = [sse("error", error={"message": "the node was lost"}), b""]
    typed("first", "second")
    status, _, err = run("chat", "mira", "--url", fabric.url)

    assert status == 0
    assert err.count("macfabric: the node was lost") == 2


def test_broken_answer_fails_if_it_was_the_only_one(run, fabric):
    fabric.streams[PATH] = [*ANSWER[:2], b""]
    status, out, err = run("chat", "mira", "The code is", "--url", fabric.url)

    assert (status, out) == (1, "otter ")
    assert "ended the stream in the middle of an answer" in err


def refusal(status, retry_after_s=0.5):
    return RefusedError("the node starts", status, {}, retry_after_s)


def test_message_is_sent_again_while_nodes_start(run, fabric, monkeypatch):
    refusals, real, slept = [refusal(503), refusal(429, 999.0)], chat._stream, []

    def answer(*arguments, **options):
        if refusals:
            raise refusals.pop(0)
        return real(*arguments, **options)

    fabric.streams[PATH] = ANSWER
    monkeypatch.setattr(chat, "_stream", answer)
    monkeypatch.setattr(chat.time, "sleep", slept.append)
    status, out, err = run("chat", "mira", "The code is", "--url", fabric.url)

    assert (status, out) == (0, "otter lantern\\x1b\n")
    assert "the node starts; retrying" in err
    assert slept[:2] == [0.5, chat.CHAT_RETRY_S_MAX]


@pytest.mark.parametrize("error", [refusal(400), refusal(503, None)], ids=["final", "no time"])
def test_other_refusals_are_final(run, fabric, monkeypatch, error):
    calls = []

    def answer(*_, **__):
        calls.append(True)
        raise error

    monkeypatch.setattr(chat, "_stream", answer)
    status, _, err = run("chat", "mira", "The code is", "--url", fabric.url)

    assert (status, len(calls)) == (1, 1)
    assert "the node starts" in err


def test_ctrl_c_stops_an_answer_and_then_the_conversation(run, fabric, typed, monkeypatch):
    calls = []

    def interrupted(*_, **__):
        calls.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_stream", interrupted)
    typed("first", "second", KeyboardInterrupt)
    status, _, err = run("chat", "mira", "--url", fabric.url)

    assert (status, len(calls)) == (0, 2)
    assert err.count("(stopped)") == 2


def test_part_has_no_line_end_and_keeps_line_ends_within(capsys):
    terminal.print_part("a\nb\x07")
    assert capsys.readouterr().out == "a\nb\\x07"
