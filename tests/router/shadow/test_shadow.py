"""Responses and runs that the active router acknowledged survive a takeover."""

import asyncio
import json
from unittest import mock

import pytest

from fabric.codec import dump_json
from fabric.errors import RejectedError
from fabric.keys import OPERATOR_HEADER
from router.shadow.change_log import ChangeLog
from router.shadow.exchange import ChangesApi, FollowRequest
from router.shadow.run_files import FilePiece, FileState, RunFiles
from tests.router.fake_node import MODEL
from tests.router.pair import AUTH, pair
from tests.router.rig import OPERATOR_KEY, until

pytestmark = pytest.mark.anyio
SCENARIO = """
scenario: one-room
title: One room
defaults: {max_tokens: 1, temperature: 0}
agents: {anna: {}, bert: {}}
phases:
  - {id: talk, agents: [anna, bert], rounds: 3, ask: {anna: Go on, bert: And then}}
"""


async def respond(router, text, **more):
    body = {"model": MODEL, "input": text, **more}
    answer = await router.http.post("/v1/responses", json=body, headers=AUTH)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(router, text):
    body = {"model": MODEL, "input": text, "stream": True}
    async with router.http.stream("POST", "/v1/responses", json=body, headers=AUTH) as stream:
        lines = [line async for line in stream.aiter_lines() if line.startswith("data: ")]
    return json.loads(lines[-1].removeprefix("data: "))["response"]


async def wait_for_follower(fabric):
    """Wait until the standby has polled the active router once."""
    one = fabric.routers[0]
    await until(lambda: one.app.state.log.is_followed)


async def test_responses_survive_their_router(tmp_path):
    async with pair(folder=tmp_path) as (fabric, one, two):
        await wait_for_follower(fabric)
        first = await respond(one, "the cat sat")
        assert two.app.state.stored.names() == [f"one/{first['id']}"], "copied before the reply"
        second = await streamed(two, "by way of the standby")
        assert len(two.app.state.stored.names()) == 2
        unwanted = await respond(one, "nobody keeps this")
        deleted = await one.http.delete(f"/v1/responses/{unwanted['id']}", headers=AUTH)
        assert deleted.status_code == 200
        assert one.app.state.log.unshared_count == 0
        await fabric.stop(one)
        await until(lambda: two.keeper.is_active)
        for response in (first, second):
            kept = await two.http.get(f"/v1/responses/{response['id']}", headers=AUTH)
            assert kept.json() == response
        lost = await two.http.get(f"/v1/responses/{unwanted['id']}", headers=AUTH)
        assert lost.status_code == 404
        after = await respond(two, "on the mat", previous_response_id=first["id"])
        assert after["previous_response_id"] == first["id"]
        served = [node.requests[-1] for node in fabric.nodes.values() if node.requests]
        prompts = b"".join(map(dump_json, served))
        assert b"the cat sat" in prompts, "the conversation continues"


async def test_later_standby_copies_everything_and_drops_deletions(tmp_path):
    async with pair(folder=tmp_path) as (fabric, one, two):
        await wait_for_follower(fabric)
        kept = await respond(one, "the cat sat", metadata={"a": "b"})
        three = await fabric.start()
        await until(lambda: f"one/{kept['id']}" in three.app.state.stored.names())
        await one.http.delete(f"/v1/responses/{kept['id']}", headers=AUTH)
        for router in (two, three):
            await until(lambda r=router: not r.app.state.stored.names())


async def test_a_run_goes_on_after_a_takeover(tmp_path):
    async with pair(folder=tmp_path) as (fabric, one, two):
        await wait_for_follower(fabric)
        for node in fabric.nodes.values():
            node.behaviour.first_delay_s = 0.3
        begun = await one.http.post(
            "/v1/scenarios", json={"yaml": SCENARIO, "run": "first"}, headers=AUTH
        )
        assert begun.status_code == 202, begun.text
        copied = {path.name for path in (tmp_path / "runs-1").glob("*/*")}
        assert {"run.json", "script.json"} <= copied, "copied before the reply"
        await fabric.stop(one)
        await until(lambda: two.keeper.is_active)
        for node in fabric.nodes.values():
            node.behaviour.first_delay_s = 0.0

        async def run_row():
            return (await two.http.get("/v1/scenarios/first", headers=AUTH)).json()

        while (row := await run_row())["state"] == "running":  # noqa: ASYNC110 - polls by HTTP
            await asyncio.sleep(0.05)
        assert (row["state"], row["turns"]) == ("ended", {"done": 6, "total": 6}), row
        removed = await two.http.delete("/v1/scenarios/first", headers=AUTH)
        assert removed.status_code == 200


async def test_an_answer_waits_for_no_standby_that_hangs(tmp_path):
    async with pair(folder=tmp_path) as (fabric, one, two):
        await wait_for_follower(fabric)

        async def hang():
            await asyncio.sleep(3600)

        with mock.patch.object(two.app.state.follower, "round", hang):
            one.app.state.log._requested_s += 1e9  # its last poll counts as recent
            await respond(one, "the cat sat")
        assert one.app.state.log.unshared_count == 1


async def test_changes_are_refused_to_all_but_a_standby(tmp_path):
    async with pair(folder=tmp_path) as (_, one, __):
        for headers in (AUTH, {OPERATOR_HEADER: OPERATOR_KEY}):
            answer = await one.http.post("/internal/changes", content=b"", headers=headers)
            assert answer.status_code == 403


def test_a_log_that_forgot_a_removal_shows_everything():
    log = ChangeLog(lambda: 0.0)
    log.note("a")
    version = log.version
    log.note_gone("b")
    assert log.since(log.life, version).gone == ("b",)
    assert log.since("another life", version).is_whole
    with mock.patch("router.shadow.change_log.SHADOW_REMOVALS_MAX", 1):
        log.note_gone("c")
        log.note_gone("d")
    changes = log.since(log.life, version)
    assert (changes.is_whole, changes.names) == (True, ("a",))


class Texts:
    """A store of texts, whose copies are `name=text`."""

    def __init__(self, log):
        self.log, self.texts = log, {}

    def put(self, name, text):
        self.texts[name] = text
        self.log.note(name)

    def encoded(self, name):
        return f"{name}={self.texts[name]}".encode() if name in self.texts else None


async def test_copies_are_complete_up_to_the_version_they_acknowledge(tmp_path):
    log = ChangeLog(lambda: 0.0)
    store = Texts(log)
    api = ChangesApi(log, store, RunFiles(tmp_path), lambda: True)
    for number in range(5):
        store.put(f"t/{number}", "x" * 40)
    log.note_gone("t/9")
    request, copied = FollowRequest(), set()
    with mock.patch("router.shadow.exchange.SHADOW_BYTES_MAX", 50):
        while True:
            answer = await api._news(request)
            copied |= set(answer.items)
            request = FollowRequest(answer.life, answer.version)
            if not answer.has_more:
                break
            assert len(copied) >= sum(log.version_of(n) <= answer.version for n in store.texts)
    assert copied == {store.encoded(name) for name in store.texts}
    assert request.version == log.version


async def test_a_version_is_acknowledged_with_all_of_its_files(tmp_path):
    log = ChangeLog(lambda: 0.0)
    api = ChangesApi(log, Texts(log), RunFiles(tmp_path), lambda: True)
    (tmp_path / "abc").mkdir()
    for name in ("a.json", "b.json"):
        (tmp_path / "abc" / name).write_text("0123456789")
    log.note()
    with mock.patch("router.shadow.run_files.SHADOW_BYTES_MAX", 5):
        part = await api._news(FollowRequest(log.life, 0))
        assert (part.version, part.has_more, len(part.files)) == (0, True, 1)
        states = {piece.path: piece.state for piece in part.files}
        rest = await api._news(FollowRequest(log.life, 0, states))
    assert (rest.version, rest.has_more, len(rest.files)) == (log.version, False, 1)


def test_run_files_are_copied_by_appended_parts(tmp_path):
    source, copy = RunFiles(tmp_path / "one"), RunFiles(tmp_path / "two")
    folder = tmp_path / "one" / "abc"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "1.jsonl").write_text("head\n")
    known = {}

    def follow():
        pieces, gone, has_more = source.news(known)
        for piece in pieces:
            copy.take(piece)
            known[piece.path] = piece.state
        for path in gone:
            copy.drop(path)
            del known[path]
        return pieces, has_more

    assert len(follow()[0]) == 2
    with (folder / "1.jsonl").open("a") as journal:
        journal.write("event\n")
    pieces, _ = follow()
    assert [(piece.offset, piece.data) for piece in pieces] == [(5, b"event\n")]
    assert (tmp_path / "two" / "abc" / "1.jsonl").read_text() == "head\nevent\n"
    (folder / "run.json").unlink()
    follow()
    assert not (tmp_path / "two" / "abc" / "run.json").exists()
    assert follow() == ([], False)


def test_a_long_journal_is_copied_in_parts(tmp_path):
    source, copy, known = RunFiles(tmp_path / "one"), RunFiles(tmp_path / "two"), {}
    folder = tmp_path / "one" / "abc"
    folder.mkdir(parents=True)
    (folder / "1.jsonl").write_text("0123456789")
    with mock.patch("router.shadow.run_files.SHADOW_BYTES_MAX", 4):
        for _ in range(3):
            pieces, _, __ = source.news(known)
            for piece in pieces:
                copy.take(piece)
                known[piece.path] = piece.state
    assert (tmp_path / "two" / "abc" / "1.jsonl").read_text() == "0123456789"


@pytest.mark.parametrize("path", ["../x/y", "a/../../b", "a", "/etc/passwd", "a/.b", "a/b/c", ""])
def test_no_piece_leaves_the_folder(tmp_path, path):
    files = RunFiles(tmp_path)
    with pytest.raises(RejectedError):
        files.take(FilePiece(path, 0, FileState(1, 1), b"x"))
    with pytest.raises(RejectedError):
        files.drop(path)
