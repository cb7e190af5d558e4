"""A voter is a separate process; its grants survive `kill -9`."""

import asyncio
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fabric.control.calls import ErrorReply, decode_reply, encode_call, spec_of
from fabric.control.node_calls import Describe, NodeView
from fabric.control.term_calls import GrantTerm, TermAnswer, TermView
from fabric.errors import FabricError, FatalError
from fabric.ids import NodeName
from fabric.keys import MEMBER_NAME, http_secret
from router.fleet.node_client import NodeLink
from router.fleet.node_http import NodeHttp
from router.tls.contexts import read_router_keys
from router.voter import FILE, TermFile
from tests.support.keys import make_keys

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 60.0


class RunningVoter:
    """A voter's process, and a router's calls to it."""

    def __init__(self, keys, data):
        argv = ["--keys", str(keys), "--data-dir", str(data), "--host", "127.0.0.1", "--port", "0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "router.voter", *argv], stdout=subprocess.PIPE, cwd=ROOT
        )
        self.url = json.loads(self.process.stdout.readline())["url"]
        self._keys = read_router_keys(keys)

    def call(self, *calls, secret=None, kind=TermAnswer):
        async def send():
            key = secret or http_secret(self._keys.cluster_key)
            async with NodeHttp(self._keys.node_facing()) as http:
                link = NodeLink(
                    NodeName("voter"),
                    None,
                    http,
                    key,
                    lambda: False,
                    proven_as=MEMBER_NAME,
                )
                link.http_url = self.url
                answers = []
                for call in calls:
                    raw = await link._over_http(encode_call(call))
                    answers.append(_decoded(kind, raw))
                return answers

        return asyncio.run(send())

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def _decoded(kind, raw):
    reply = decode_reply(kind, raw)
    return (reply.status, reply.code) if isinstance(reply, ErrorReply) else reply


@pytest.fixture
def keys(tmp_path):
    folder = tmp_path / "keys"
    make_keys(folder)
    return folder


def test_a_voter_grants_one_term_and_remembers_it(tmp_path, keys):
    voter = RunningVoter(keys, tmp_path / "data")
    try:
        granted, refused = voter.call(GrantTerm(4, "one", LONG_S), GrantTerm(5, "two", LONG_S))
        assert (granted.granted, refused.granted, refused.term) == (True, False, 4)
    finally:
        voter.kill()
    voter = RunningVoter(keys, tmp_path / "data")
    try:
        again, renewed = voter.call(GrantTerm(4, "two", LONG_S), GrantTerm(4, "one", LONG_S))
        assert (again.granted, again.router, renewed.granted) == (False, "one", True)
        assert voter.call(Describe(), kind=NodeView) == [(400, "unknown_call")]
        assert voter.call(GrantTerm(9, "x", LONG_S), secret="guess") == [(401, "invalid_api_key")]
    finally:
        voter.kill()
    assert spec_of(GrantTerm).reply is TermAnswer


def test_a_damaged_file_stops_a_voter(tmp_path):
    (tmp_path / FILE).write_text("{")
    with pytest.raises(FatalError, match="stop all routers but one"):
        TermFile(tmp_path / FILE).read()


def test_voter_stores_terms_on_volumes_without_full_flushes(tmp_path, monkeypatch):
    """Such as network and FAT volumes of a Mac."""

    def refuse(*_):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    file = TermFile(tmp_path / FILE)
    file.write(TermView(3, "one"))
    assert file.read() == TermView(3, "one")


def test_term_that_cannot_be_stored_is_not_granted(tmp_path):
    file = TermFile(tmp_path / "missing" / FILE)
    assert file.read() is None
    with pytest.raises(FabricError, match="cannot store"):
        file.write(TermView(1, "one"))
