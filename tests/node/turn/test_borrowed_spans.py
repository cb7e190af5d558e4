"""Documents read by another agent in another order are borrowed on request."""

import asyncio
from functools import partial

import mlx.core as mx
import pytest

from fabric.edit_mode import EditMode
from fabric.ids import TenantId
from fabric.kvcache.arrangement import Move
from fabric.record.layout_patches import Patch
from node.store.block_files import file_name
from node.tiers.restore import load_layout
from node.turn import borrowed_spans
from tests.node.turn.test_edited_turns import agent_of, continued
from tests.support import services
from tests.support.agent_traffic import words
from tests.support.architectures import ARCHITECTURES
from tests.support.services import TENANT, migrate, running
from tests.support.tiny_models import ONE_LAYER, write_model

ANYWHERE, AMORTIZE = EditMode.ANYWHERE, EditMode.AMORTIZE
OTHER = TenantId("other")
DOCUMENTS = [words(100 + i, 70) for i in range(3)]
ask = partial(services.ask, max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "llama", ONE_LAYER))


def question(order, text_of_question, join=None):
    """Return a question about documents: each a message, or all in one."""
    texts = [DOCUMENTS[i] for i in order]
    if join is not None:
        texts = [join.join(texts)]
    turns = [{"role": "user", "content": text} for text in texts]
    return [
        {"role": "system", "content": words(1, 40)},
        *turns,
        {"role": "user", "content": text_of_question},
    ]


FIRST = question((0, 1, 2), words(50, 8))
SECOND = question((2, 0, 1), words(51, 11))


def on_loop(service, work):
    return asyncio.run_coroutine_threadsafe(work, service._loop).result(60)


def evict(service, name):
    """Evict an agent from a node, as if to make room."""
    agent = agent_of(service, name)

    async def remove():
        service.node.resources.table.remove(agent.key)
        service.node.resources.store.evict([agent.saved])

    on_loop(service, remove())


def computed_tokens(reply):
    return reply.admitted.prompt_tokens - reply.admitted.cached_tokens


def test_reordered_documents_are_borrowed(tmp_path, model):
    with running(tmp_path, model) as service:
        ask(service, FIRST, agent="a")
        second = ask(service, SECOND, agent="b", edits=ANYWHERE)
        agent = agent_of(service, "b")
        assert second.admitted.match == "spans"
        # New text, the first tokens of each document, and up to a block of the beginning.
        assert computed_tokens(second) < second.admitted.prompt_tokens // 4
        notes = agent.saved.edited.notes
        assert [note.is_borrowed for note in notes] == [True] * len(notes)
        assert sum(n.moved_tokens for n in notes) == second.admitted.amortized_tokens
        assert agent.exact_tokens + second.admitted.amortized_tokens == (
            second.admitted.cached_tokens
        )
        assert agent.view().exact_tokens == agent.exact_tokens
        assert agent.is_durable
        lengths = [note.moved_tokens for note in notes]

    with running(tmp_path, model) as service:
        again = continued(SECOND, second.text, words(52, 9))
        later = ask(service, again, agent="b", edits=ANYWHERE)
        assert later.admitted.cache == "disk"
        assert computed_tokens(later) < 120
        assert later.admitted.amortized_tokens > sum(lengths)


def test_documents_within_one_message_are_matched_by_content(tmp_path, model):
    join = words(70, 5)
    with running(tmp_path, model) as service:
        ask(service, question((0, 1, 2), words(50, 8), join=words(71, 7)), agent="a")
        second = question((1, 2, 0), words(51, 11), join=join)
        reply = ask(service, second, agent="b", edits=ANYWHERE)
        assert reply.admitted.match == "spans"
        assert computed_tokens(reply) < reply.admitted.prompt_tokens // 3


def test_borrowed_layout_answers_like_one_built_by_hand(tmp_path, model, monkeypatch):
    """By hand: load the rows that the layout names, and compute the others in order."""
    patched = []
    build = borrowed_spans.with_patches

    def note(base, patches, notes, lenders):
        patched.append((base, patches))
        return build(base, patches, notes, lenders)

    monkeypatch.setattr(borrowed_spans, "with_patches", note)
    with running(tmp_path, model) as service:
        ask(service, FIRST, agent="a")
        lender_record = agent_of(service, "a").saved
        reply = ask(service, SECOND, agent="b", edits=ANYWHERE)
        [(base, patches)] = patched
        saved = agent_of(service, "b").saved
        ids = list(saved.token_ids[: saved.prompt_tokens_count])
        store, engine = service.node.resources.store, service.node.resources.engine.engine

        def by_hand():
            whole = store.layout(lender_record)
            runs = [Patch(whole, Move(p.move.start, p.move.end, p.move.new_start)) for p in patches]
            for move in (run.move for run in runs):
                run = list(lender_record.token_ids[move.start : move.end])
                assert run == ids[move.new_start : move.new_end]
            cache = engine.new_cache(len(ids) + 64)
            load_layout(store, TENANT, ids, build(base, runs), cache)
            while (at := cache.tokens_count) < len(ids) - 1:
                until = cache.ahead[0][0] if cache.ahead else len(ids) - 1
                engine.prefill(cache, ids[at : min(at + 256, until)])
            tokens_out, token = [], ids[-1]
            for _ in range(6):
                logits = engine.feed([cache], [mx.array([token], mx.uint32)])[0]
                token = int(mx.argmax(logits))
                tokens_out.append(token)
            return tokens_out

        async def between():
            return await service.node.resources.engine.between_steps(by_hand)

        expected = on_loop(service, between())
        answer_ids = list(saved.token_ids[saved.prompt_tokens_count :])[:6]
        assert answer_ids == expected[: len(answer_ids)]
        assert len(answer_ids) > 2
        assert reply.admitted.amortized_tokens


def test_borrowed_spans_require_opt_in_and_same_tenant(tmp_path, model):
    with running(tmp_path, model) as service:
        ask(service, FIRST, agent="a")
        stranger = ask(service, SECOND, agent="b", tenant=OTHER, edits=ANYWHERE)
        assert stranger.admitted.cached_tokens == 0
        replies = [ask(service, SECOND, agent="c", edits=mode) for mode in (None, AMORTIZE)]
        nameless = ask(service, SECOND, edits=ANYWHERE)
        for reply in (*replies, nameless):
            assert reply.admitted.amortized_tokens == 0
            assert reply.text == stranger.text
    with running(tmp_path, model) as service:
        borrowed = ask(service, SECOND, agent="d", edits=ANYWHERE)
        assert borrowed.admitted.match in {
            "diverge",
            "none",
        }  # an exact prefix is longer
        exact = ask(service, continued(SECOND, stranger.text, words(52, 9)), agent="e")
        cold = ask(service, continued(SECOND, stranger.text, words(52, 9)), agent="e", tenant=OTHER)
        assert exact.text == cold.text


def test_exact_turn_after_borrowing_is_exact(tmp_path, model):
    with running(tmp_path, model) as service:
        ask(service, FIRST, agent="a")
        ask(service, SECOND, agent="b", edits=ANYWHERE)
        otherwise = [*SECOND[:-1], {"role": "user", "content": words(52, 9)}]
        exact = ask(service, otherwise, agent="b")
        cold = ask(service, otherwise, agent="b", tenant=OTHER)
        assert exact.text == cold.text
        assert exact.admitted.amortized_tokens == 0
        assert agent_of(service, "b").saved.edited is None


@pytest.mark.parametrize("how", ["evicted", "damaged"])
def test_spans_without_a_source_are_computed(tmp_path, model, how):
    with running(tmp_path, model) as service:
        ask(service, FIRST, agent="a")
        names = [file_name(ref) for ref in agent_of(service, "a").saved.refs]
        exact = ask(service, SECOND, agent="b", tenant=OTHER)
        if how == "evicted":
            evict(service, "a")
        else:
            for path in tmp_path.rglob("*.full"):
                if f"blocks/{path.name}" in names:
                    path.write_bytes(path.read_bytes()[:-4] + b"lost")
        reply = ask(service, SECOND, agent="b", edits=ANYWHERE)
        assert reply.text == exact.text
        assert reply.admitted.amortized_tokens == 0
        assert agent_of(service, "b").is_durable


def test_borrowed_spans_survive_their_source_and_a_migration(tmp_path, model):
    """The lender's text is not stored with it; the borrower's memory is complete on any node."""
    with (
        running(tmp_path / "a", model, name="node-a") as source,
        running(tmp_path / "b", model, name="node-b") as target,
    ):
        ask(source, FIRST, agent="a")
        answer = ask(source, SECOND, agent="b", edits=ANYWHERE).text
        borrower = agent_of(source, "b").saved
        for origin in borrower.edited.origins:
            text = list(origin.tokens)
            assert any(
                list(borrower.token_ids[i : i + len(text)]) == text
                for i in range(len(borrower.token_ids))
            )

        evict(source, "a")
        assert not source.node.resources.store.missing(borrower)
        following = continued(SECOND, answer, words(52, 9))
        migrate(source, target, "b", 1)
        there = ask(target, following, agent="b", epoch=2, edits=ANYWHERE)
        assert there.admitted.amortized_tokens
        assert computed_tokens(there) < 120
    with running(tmp_path / "c", model) as undisturbed:
        ask(undisturbed, FIRST, agent="a")
        assert ask(undisturbed, SECOND, agent="b", edits=ANYWHERE).text == answer
        assert ask(undisturbed, following, agent="b", edits=ANYWHERE).text == there.text


def test_existing_agent_borrows_missing_spans(tmp_path, model):
    """The spans follow its own memory, which is hot or edited."""
    with running(tmp_path, model) as service:
        ask(service, FIRST, agent="a")
        beginning = question((), words(60, 90))
        answer = ask(service, beginning, agent="b").text
        longer = [*continued(beginning, answer, DOCUMENTS[1]), *question((0,), words(61, 9))[1:]]
        reply = ask(service, longer, agent="b", edits=ANYWHERE)
        assert reply.admitted.match == "spans"
        assert agent_of(service, "b").exact_tokens > 100
        assert computed_tokens(reply) < reply.admitted.prompt_tokens // 3
        edited = [longer[0], {**longer[1], "content": "gone"}, *longer[2:]]
        more = [*continued(edited, reply.text, DOCUMENTS[2]), *question((), words(62, 9))[1:]]
        edited_reply = ask(service, more, agent="b", edits=ANYWHERE)
        assert edited_reply.admitted.match == "spans"
        assert computed_tokens(edited_reply) < edited_reply.admitted.prompt_tokens // 3


def test_unmovable_models_borrow_nothing_and_give_the_reason(tmp_path):
    folder = write_model(tmp_path / "model", ARCHITECTURES["qwen3_next"])
    with running(tmp_path, str(folder)) as service:
        ask(service, FIRST, agent="a")
        reply = ask(service, SECOND, agent="b", edits=ANYWHERE)
        assert "nothing of other contexts is taken" in reply.admitted.match_reason
        assert reply.admitted.amortized_tokens == 0
