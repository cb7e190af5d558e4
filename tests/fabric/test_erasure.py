import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric import erasure
from fabric.erasure import Tombstone, Tombstones, decode_tombstone, encode_tombstone, tombstone
from fabric.errors import CorruptDataError, RejectedError
from fabric.limits import TOMBSTONE_S

KEY = bytes(range(32))
NOW_S = 1_700_000_000.0


def stone(agent="alice", epoch=3, age_s=0.0, tenant="t"):
    return tombstone(KEY, tenant, agent, epoch, NOW_S - age_s)


STONES = st.builds(
    stone, st.sampled_from("abcdefgh"), st.integers(1, 4), st.sampled_from([0.0, 5.0, 9.0])
)


@given(st.lists(STONES, max_size=20), st.randoms(use_true_random=False))
def test_sets_are_the_same_in_any_order_and_however_often_merged(stones, random):
    one, two = Tombstones(), Tombstones()
    one.merge(stones, NOW_S)
    shuffled = stones * 2
    random.shuffle(shuffled)
    for item in shuffled:
        two.merge([item], NOW_S)

    assert tuple(one) == tuple(two)
    assert one.fingerprint == two.fingerprint
    assert (one.fingerprint == 0) == (not stones)
    for item in stones:
        assert one.epoch_of(item.agent) >= item.epoch


def test_bounded_and_who_erases_a_lot_forgets_its_own(monkeypatch):
    monkeypatch.setattr(erasure, "TOMBSTONES_MAX", 10)
    kept, flood = Tombstones(), [stone(f"x{i}", age_s=100.0 - i, tenant="loud") for i in range(50)]
    kept.merge([stone("quiet", age_s=1_000.0, tenant="calm")], NOW_S)
    news = kept.merge(flood, NOW_S)

    assert len(kept) == 10
    assert kept.epoch_of(stone("quiet", tenant="calm").agent) == 3
    assert [item.agent for item in news] == [item.agent for item in flood[-9:]]


def test_old_ones_go_and_do_not_come_back():
    kept, old = Tombstones(), stone(age_s=TOMBSTONE_S - 1)
    kept.merge([old], NOW_S)

    assert kept.expire(NOW_S) == []
    assert kept.expire(NOW_S + 2) == [old]
    assert kept.merge([old], NOW_S + 2) == []
    assert (len(kept), kept.fingerprint) == (0, 0)


def test_a_tombstone_does_not_tell_who_it_was():
    raw = encode_tombstone(stone("someone@example.com", tenant="family"))

    assert b"someone" not in raw
    assert b"family" not in raw
    assert decode_tombstone(raw) == stone("someone@example.com", tenant="family")
    assert stone(tenant="t").agent != stone(tenant="u").agent


def test_every_damaged_byte_is_noticed():
    raw = encode_tombstone(stone())
    for index in range(len(raw)):
        damaged = bytearray(raw)
        damaged[index] ^= 1
        with pytest.raises(CorruptDataError):
            decode_tombstone(bytes(damaged))


@pytest.mark.parametrize(
    ("agent", "epoch", "erased_s"),
    [
        ("../x", 1, 1.0),
        ("ab" * 16, 0, 1.0),
        ("ab" * 16, 1 << 60, 1.0),
        ("ab" * 16, 1, float("nan")),
    ],
)
def test_no_other_tombstones_exist(agent, epoch, erased_s):
    with pytest.raises(RejectedError):
        Tombstone(agent, "cd" * 16, epoch, erased_s)
