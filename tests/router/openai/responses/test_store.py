import pytest

import router.openai.responses.store
from fabric.turn.messages import Message, MessageRole
from router.openai.responses.store import ResponseStore, StoredResponse


def made(name, text="x", agent="mira", epoch=5):
    message = Message(MessageRole.ASSISTANT, (text,))
    return StoredResponse({"id": name}, [], (message,), {f"item-{name}": message}, agent, epoch)


@pytest.fixture
def store():
    return ResponseStore(lambda _: 0)


def test_the_oldest_of_the_tenant_with_most_goes_first(store, monkeypatch):
    monkeypatch.setattr(router.openai.responses.store, "RESPONSES_STORED_MAX", 4)
    store.put("small", made("s"))
    for index in range(5):
        store.put("large", made(f"l{index}"))

    assert [store.get("large", f"l{i}") is not None for i in range(5)] == [False] * 2 + [True] * 3
    assert store.get("small", "s")
    assert store.item("large", "item-l0") is None
    assert store.item("large", "item-l4") is not None


def test_they_take_so_many_bytes_together_and_one_that_is_larger_is_not_kept(store, monkeypatch):
    monkeypatch.setattr(router.openai.responses.store, "RESPONSES_BYTES_MAX", 10_000)
    for index in range(5):
        store.put("t", made(f"r{index}", "x" * 4_000))
    kept = [index for index in range(5) if store.get("t", f"r{index}")]
    store.put("t", made("huge", "x" * 20_000))

    assert kept == [3, 4]
    assert store.get("t", "huge") is None
    assert store._sizes == {}


def test_what_was_deleted_is_gone_once(store):
    store.put("t", made("r"))

    assert store.delete("t", "r")
    assert not store.delete("t", "r")
    assert not store.delete("other", "r")
    assert store.item("t", "item-r") is None
    assert (store._by_tenant, store._items, store._sizes, store._count) == ({}, {}, {}, 0)


def test_an_agents_go_when_it_is_erased_and_none_comes_behind():
    erased = {}
    store = ResponseStore(lambda key: erased.get(key, 0))
    store.put("t", made("r"))
    store.put("t", made("other", agent="ivan"))
    erased["t", "mira"] = 7
    store.forget(("t", "mira"))
    store.put("t", made("late", epoch=7))
    store.put("t", made("next", epoch=8))

    assert [store.get("t", name) is not None for name in ("r", "other", "late", "next")] == [
        *(False, True, False, True)
    ]
