import pytest

import router.openai.responses.store
from fabric.turn.messages import Message, MessageRole
from router.openai.responses.store import ResponseStore, StoredResponse


def stored(name, text="x", agent="mira", epoch=5):
    message = Message(MessageRole.ASSISTANT, (text,))
    return StoredResponse({"id": name}, [], (message,), {f"item-{name}": message}, agent, epoch)


@pytest.fixture
def store():
    return ResponseStore(lambda _: 0)


def test_oldest_response_of_largest_tenant_is_evicted_first(store, monkeypatch):
    monkeypatch.setattr(router.openai.responses.store, "RESPONSES_STORED_MAX", 4)
    store.put("small", stored("s"))
    for index in range(5):
        store.put("large", stored(f"l{index}"))

    assert [store.get("large", f"l{i}") is not None for i in range(5)] == [False] * 2 + [True] * 3
    assert store.get("small", "s")
    assert store.item("large", "item-l0") is None
    assert store.item("large", "item-l4") is not None


def test_stored_bytes_are_bounded_and_oversized_response_is_not_stored(store, monkeypatch):
    monkeypatch.setattr(router.openai.responses.store, "RESPONSES_BYTES_MAX", 10_000)
    for index in range(5):
        store.put("t", stored(f"r{index}", "x" * 4_000))
    kept = [index for index in range(5) if store.get("t", f"r{index}")]
    store.put("t", stored("huge", "x" * 20_000))

    assert kept == [3, 4]
    assert store.get("t", "huge") is None
    assert store._sizes == {}


def test_deleted_response_is_gone(store):
    store.put("t", stored("r"))

    assert store.delete("t", "r")
    assert not store.delete("t", "r")
    assert not store.delete("other", "r")
    assert store.item("t", "item-r") is None
    assert (store._by_tenant, store._items, store._sizes, store._count) == ({}, {}, {}, 0)


def test_erasing_agent_removes_its_responses_and_rejects_late_ones():
    erased = {}
    store = ResponseStore(lambda key: erased.get(key, 0))
    store.put("t", stored("r"))
    store.put("t", stored("other", agent="ivan"))
    erased["t", "mira"] = 7
    store.forget(("t", "mira"))
    store.put("t", stored("late", epoch=7))
    store.put("t", stored("next", epoch=8))

    assert [store.get("t", name) is not None for name in ("r", "other", "late", "next")] == [
        *(False, True, False, True)
    ]
