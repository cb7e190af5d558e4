"""Grammars of a node's turns: compiled, kept, bounded, and refused before computation."""

import asyncio
import json
import threading
from unittest import mock

import jsonschema
import pytest

from fabric.errors import OverloadedError, RejectedError
from fabric.ids import AgentId, OperationId, TenantId
from fabric.turn.generation import FinishReason, GenerateRequest, Sampling
from node.grammar import compiler as compiling
from node.prompt import answer_grammars as grammars
from tests.support.formats import HOSTILE, PLACE, TOO_COMPLEX, choice, regex, schema
from tests.support.services import TENANT, ask, identity_of, running

QUESTION = [{"role": "user", "content": "The vault code of Mira is"}]
OTHER = TenantId("other")


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with running(tmp_path_factory.mktemp("node"), "recall") as node:
        yield node


@pytest.fixture
def compiled(node):
    """Clear the kept grammars, and count compilations."""
    parts = node.node.turns.prompts.grammars
    parts._kept.clear()
    whole = parts.compiler.compile
    with mock.patch.object(parts.compiler, "compile", side_effect=whole) as compile_:
        yield compile_


def test_answer_fits_its_format_and_ends(node):
    reply = ask(node, QUESTION, output=schema(PLACE), max_tokens=200)
    assert reply.finished.reason is FinishReason.STOP
    jsonschema.validate(json.loads(reply.text), PLACE)
    assert ask(node, QUESTION, output=choice("no", "never")).text in {"no", "never"}


def test_stop_string_ends_a_formatted_answer(node):
    reply = ask(node, QUESTION, output=schema({"const": "one, two"}), stop=(", ",))
    assert (reply.text, reply.finished.stop_string) == ('"one', ", ")


@pytest.mark.parametrize("name", HOSTILE)
def test_refused_format_creates_no_agent(node, name):
    with pytest.raises(RejectedError) as caught:
        ask(node, QUESTION, agent="hostile", output=HOSTILE[name])
    assert (int(caught.value.status), caught.value.param) == (400, "response_format")
    assert node.node.resources.table.get((TENANT, AgentId("hostile"))) is None


def test_format_with_ignore_eos_is_refused(node):
    with pytest.raises(RejectedError, match="ignore_eos"):
        ask(node, QUESTION, output=choice("a"), ignore_eos=True)


def test_format_growing_too_complex_fails_only_its_answer(node):
    reply = ask(node, QUESTION, output=TOO_COMPLEX, max_tokens=60)
    assert (reply.events[-1].status, reply.events[-1].code) == (400, "invalid_format")
    assert ask(node, QUESTION, output=choice("yes")).text == "yes"


def test_known_format_is_not_compiled_again(node, compiled):
    for _ in range(3):
        ask(node, QUESTION, output=regex("[a-d]+"), max_tokens=4)
    assert compiled.call_count == 1
    ask(node, QUESTION, output=regex("[a-e]+"), max_tokens=4)
    assert compiled.call_count == 2


def test_compiled_grammars_are_not_shared_between_tenants(node, compiled):
    for tenant in (TENANT, OTHER, TENANT):
        ask(node, QUESTION, output=regex("[a-d]+"), max_tokens=4, tenant=tenant)
    assert compiled.call_count == 2


def test_strict_and_lenient_formats_are_cached_separately(node):
    loose = schema(
        {"type": "array", "items": {"type": "null"}, "uniqueItems": True}, is_strict=False
    )
    ask(node, QUESTION, output=loose, max_tokens=4)
    with pytest.raises(RejectedError):
        ask(node, QUESTION, output=schema(json.loads(loose.source)), max_tokens=4)


def test_number_of_kept_grammars_is_bounded(node, compiled):
    kept = node.node.turns.prompts.grammars._kept
    with mock.patch.object(grammars, "GRAMMARS_KEPT_MAX", 2):
        for text in ("a", "b", "a", "c", "a", "b"):
            ask(node, QUESTION, output=choice(text))
            assert len(kept) <= 2
    assert compiled.call_count == 4, "a, b, c, and b again"


def test_hanging_compilation_is_refused_after_a_timeout(node):
    parts, gate = node.node.turns.prompts.grammars, threading.Event()
    with (
        mock.patch.object(grammars, "GRAMMAR_COMPILE_S", 0.05),
        mock.patch.object(parts.compiler, "compile", side_effect=lambda _: gate.wait(60)),
        pytest.raises(RejectedError, match="to compile") as caught,
    ):
        ask(node, QUESTION, output=choice("never compiled"))
    gate.set()
    assert caught.value.code == "invalid_format"


def test_number_of_waiting_compilations_is_bounded(node):
    with (
        mock.patch.object(grammars, "GRAMMARS_COMPILING_MAX", 0),
        pytest.raises(OverloadedError),
    ):
        ask(node, QUESTION, output=choice("one too many"))


def test_hang_up_during_compilation_ends_the_wait(node):
    parts, gate = node.node.turns.prompts.grammars, threading.Event()
    entered = threading.Event()

    def stuck(output):
        entered.set()
        gate.wait(60)

    async def hang_up():
        sampling = Sampling(output=choice("hung up"))
        operation = OperationId("hang-up")
        request = GenerateRequest(operation, TENANT, identity_of(None), sampling, prompt="a")
        stream = node.node.turns.serve(request)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.get_running_loop().run_in_executor(None, entered.wait)
        (turn,) = node.node.live_turns
        waiting.cancel()
        await asyncio.wait([waiting])
        await stream.aclose()
        await asyncio.wait([turn.task])
        assert parts._waiting_count == 0

    with mock.patch.object(parts.compiler, "compile", stuck):
        asyncio.run_coroutine_threadsafe(hang_up(), node._loop).result(60)
    gate.set()


def test_tokenizer_facts_are_read_once(node):
    with mock.patch.object(compiling, "_read") as read:
        ask(node, QUESTION, output=choice("read already"))
    read.assert_not_called()
