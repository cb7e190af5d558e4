"""The judge of reuse excuses only agents disturbed since their acknowledgement."""

import asyncio
from types import SimpleNamespace as Part
from unittest import mock

import pytest

from fabric.edit_mode import EditMode
from fabric.turn.generation import IdentityKind
from node.tiers.derived_memory import DerivedMemory
from tests.sim.lineage import Lineage
from tests.sim.model import END, FULL, KINDS
from tests.sim.reuse_judge import Attempt, ReuseJudge
from tests.sim.watch import Watch

AMORTIZE = EditMode.AMORTIZE
KEY = "red", "alice"
FILLER = "the first prompt  " * 20


class Case:
    """Alice, acknowledged by node-a at 1.0 s; her client gets the reply at 5.0 s."""

    def __init__(self):
        self.found = []
        self.loop = Part(now_s=0.0)
        drive = Part(hurt=frozenset())
        host = {"is_serving": True, "drive": drive, "incarnation": 1}
        self.nodes = {f"node-{letter}": Part(**host) for letter in "abc"}
        self.router = Part(is_serving=True, incarnation=1)
        self.kind = FULL
        self.chaos = Part(was_network_bad=False)
        self.disk_judge = Part(records=lambda _: {}, moved=set())
        self.lineage = Part(was_cut=lambda _key, _since_s: False)
        self.watch, self.reuse_judge = Watch(self), ReuseJudge(self)
        self.finish("node-a", 1.0)

    def fail(self, text):
        self.found.append(text)

    def at(self, now_s):
        self.loop.now_s = now_s
        return self

    def finish(self, node, at_s, epoch=1, *, is_durable=True):
        request = Part(operation="op-1")
        config = Part(incarnation=1)
        parts = Part(prefixes=Part(identity=Part(name=node, config=config)))
        turn = Part(seen_epoch=(epoch, KEY), _request=request, _parts=parts)
        self.at(at_s).watch._on_finished(turn, is_durable=is_durable)

    def judge(
        self,
        node,
        cached_tokens=0,
        *,
        amortized_tokens=0,
        edits=EditMode.FORGET,
        answer="",
        prompt=FILLER + "!",
    ):
        """Deliver the acknowledgement, have `node` admit the next turn; return the violations."""
        self.at(5.0)
        taken = Part(node="node-a", epoch=1, cached_tokens=300, amortized_tokens=amortized_tokens)
        acked = self.reuse_judge.ack(KEY, FILLER, answer, self.watch.find_end("op-1", taken), taken)
        talk = Part(key=KEY, name="alice", acked=acked)
        talk.attempts = [Attempt(prompt, edits)]
        talk.is_shared = talk.may_be_erased = False
        talk.identity = Part(kind=IdentityKind.AGENT)
        self.at(6.0)
        admitted = Part(
            agent="alice", node=node, epoch=2, cached_tokens=cached_tokens, cache="cold",
            match_reason="",
        )  # fmt: skip
        self.watch.on_admitted("red", admitted, self.router)
        self.reuse_judge.check_admitted(talk, admitted)
        return self.found


@pytest.mark.parametrize("node", ["node-a", "node-b"])
def test_missing_acknowledged_cache_is_a_violation(node):
    assert len(Case().judge(node)) == 1
    assert Case().judge(node, cached_tokens=len(FILLER)) == []


def test_edited_cache_must_be_reused_on_request_and_else_its_prefix():
    """Here 280 of 300 cached tokens are exact."""
    edited = {"amortized_tokens": 20}
    assert Case().judge("node-a", cached_tokens=280, **edited) == []
    assert len(Case().judge("node-a", cached_tokens=279, **edited)) == 1
    assert len(Case().judge("node-a", cached_tokens=280, **edited, edits=AMORTIZE)) == 1


@pytest.mark.parametrize("answer", [chr(END), "a word" + chr(END)])
def test_context_includes_the_end_token_of_its_answer(answer):
    """Where a state is needed, a prompt that diverges there cannot resume from the end."""
    context, case = FILLER + answer, Case()
    case.kind = KINDS["recurrent"]
    edited = context[:-1] + "[cleared]"
    assert case.judge("node-a", len(FILLER) - 1, answer=answer, prompt=edited) == []
    assert case.judge("node-a", len(context), answer=answer, prompt=context + "!") == []
    assert len(case.judge("node-a", len(context) - 1, answer=answer, prompt=context + "!")) == 1


@pytest.mark.parametrize(("ends_s", "is_fine"), [(0.9, False), (2.0, True)])
def test_cut_excuses_the_acknowledgements_before_its_end(ends_s, is_fine):
    """Derived memory is dropped once the agent's turn has ended; the drop begins at 0.5 s."""
    case = Case()
    case.note, case.lineage = lambda _text: None, Lineage(case)

    async def drop(_memory, _agent):
        case.at(ends_s)

    with mock.patch.object(DerivedMemory, "_drop", drop), case.at(0.5).lineage.taps():
        asyncio.run(DerivedMemory._drop(None, Part(key=KEY)))
    assert (case.judge("node-a") == []) is is_fine


@pytest.mark.parametrize(("evicted_s", "is_fine"), [(0.5, False), (3.0, True)])
def test_eviction_excuses_only_earlier_acknowledgements(evicted_s, is_fine):
    """The client gets the acknowledgement at 5 s in both cases."""
    case = Case()
    case.watch.evicted[KEY].clear()
    case.at(evicted_s).watch.evicted[KEY].add("node-a")
    if evicted_s < 1.0:
        case.finish("node-a", 1.0)
    assert (case.judge("node-a") == []) is is_fine


def test_eviction_excuses_a_turn_that_ended_before_its_admission_arrived():
    case = Case()
    case.at(2.0).watch.note_evicted(KEY, "node-a")
    case.watch._finished["op-1"].pop()
    case.finish("node-a", 3.0)  # the next turn, of a restarted agent
    case.watch._finished["op-1"][:] = [("node-a", 1, 1.0)]
    assert case.judge("node-a") == []


def test_another_node_may_own_after_an_unreported_eviction():
    case = Case()
    case.at(3.0).watch.evicted[KEY].add("node-a")
    assert case.judge("node-b") == []
    case.finish("node-b", 7.0)  # also at epoch 1
    assert case.found == []


def test_two_owners_of_an_epoch_are_a_violation():
    case = Case()
    case.finish("node-b", 2.0)
    assert len(case.found) == 1


@pytest.mark.parametrize("is_durable", [True, False])
def test_unsaved_turn_is_owned_until_its_process_dies(is_durable):
    case = Case()
    case.finish("node-a", 2.0, epoch=2, is_durable=is_durable)
    case.nodes["node-a"].incarnation = 2
    case.finish("node-b", 3.0, epoch=2)
    assert len(case.found) == is_durable
    case.finish("node-c", 4.0, epoch=2)
    assert len(case.found) == 1 + is_durable


def node_starts(case):
    case.nodes["node-a"].is_serving = False


def hung_before_the_reply_arrived(case):
    case.at(3.0).watch.on_trouble("node-a")


def killed_as_a_later_owner(case):
    case.at(2.0).watch.on_host(KEY, "node-c")  # a move
    case.at(3.0).watch.on_trouble("node-c")


@pytest.mark.parametrize(
    "what", [node_starts, hung_before_the_reply_arrived, killed_as_a_later_owner]
)
def test_trouble_of_the_owner_excuses_other_nodes_only(what):
    case = Case()
    what(case)
    assert case.judge("node-b") == []
    case = Case()
    what(case)
    assert len(case.judge("node-a")) == 1


def test_trouble_of_an_uninvolved_node_excuses_nothing():
    case = Case()
    case.at(0.5).watch.on_host(KEY, "node-c")  # before it was acknowledged
    case.at(3.0).watch.on_trouble("node-c")
    assert len(case.judge("node-b")) == 1
