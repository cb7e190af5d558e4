import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import CorruptDataError, RejectedError
from fabric.limits import ERASED_S_MAX
from fabric.record import tombstone as erasure
from fabric.record.tombstone import (
    Tombstone,
    Tombstones,
    decode_tombstone,
    encode_tombstone,
    tombstone,
)

KEY = bytes(range(32))
NOW_S = 1_700_000_000.0


def make_tombstone(agent="alice", epoch=3, age_s=0.0, tenant="t"):
    return tombstone(KEY, tenant, agent, epoch, NOW_S - age_s)


STONES = st.builds(
    make_tombstone, st.sampled_from("abcdefgh"), st.integers(1, 4), st.sampled_from([0.0, 5.0, 9.0])
)


@given(st.lists(STONES, max_size=20), st.randoms(use_true_random=False))
def test_merging_tombstones_is_commutative_and_idempotent(stones, random):
    one, two = Tombstones(), Tombstones()
    one.merge(stones)
    shuffled = stones * 2
    random.shuffle(shuffled)
    for item in shuffled:
        two.merge([item])

    assert tuple(one) == tuple(two)
    assert one.fingerprint == two.fingerprint
    assert (one.fingerprint == 0) == (not stones)
    for item in stones:
        assert one.epoch_of(item.agent) >= item.epoch


def test_full_set_drops_tombstones_of_the_tenant_with_most(monkeypatch):
    monkeypatch.setattr(erasure, "TOMBSTONES_MAX", 10)
    kept, flood = (
        Tombstones(),
        [make_tombstone(f"x{i}", age_s=100.0 - i, tenant="loud") for i in range(50)],
    )
    kept.merge([make_tombstone("quiet", age_s=1_000.0, tenant="calm")])
    news = kept.merge(flood)

    assert len(kept) == 10
    assert kept.epoch_of(make_tombstone("quiet", tenant="calm").agent) == 3
    assert [item.agent for item in news] == [item.agent for item in flood[-9:]]


YEAR_S = 365 * 86_400.0


@pytest.mark.parametrize("jumps_s", [[0.0] * 3, [YEAR_S, 0.0, -YEAR_S], [-NOW_S, YEAR_S, 0.0]])
def test_oldest_tombstones_are_dropped_despite_clock_jumps(monkeypatch, jumps_s):
    monkeypatch.setattr(erasure, "TOMBSTONES_MAX", 2)
    kept, tombstones = Tombstones(), []
    for number, jump_s in enumerate(jumps_s):
        erased_s = kept.next_s(NOW_S + jump_s)
        tombstones.append(tombstone(KEY, "t", f"x{number}", 1, erased_s))
        kept.merge(tombstones[-1:])

    assert sorted(kept, key=lambda item: item.erased_s) == tombstones[1:]
    again = Tombstones()
    again.merge(tombstones)
    assert (tuple(again), again.fingerprint) == (tuple(kept), kept.fingerprint)
    assert kept.merge(tombstones[:1]) == [], "a dropped tombstone does not return"


def test_erasures_continue_at_the_last_representable_time():
    kept = Tombstones()
    for number in range(3):
        item = tombstone(KEY, "t", f"x{number}", 1, kept.next_s(ERASED_S_MAX))
        assert kept.merge([item]) == [item]


@given(
    st.lists(st.tuples(st.sampled_from("tuv"), st.integers(0, 30)), max_size=40, unique=True),
    st.randoms(use_true_random=False),
)
def test_full_sets_converge_in_any_merge_order(names, random):
    """Otherwise two nodes would exchange the same tombstones forever."""
    stones = [make_tombstone(f"{number}", age_s=float(number), tenant=t) for t, number in names]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(erasure, "TOMBSTONES_MAX", 7)
        one, two, three = Tombstones(), Tombstones(), Tombstones()
        half = random.randrange(len(stones) + 1)
        one.merge(stones[:half])
        two.merge(stones[half:])
        for item in random.sample(stones, len(stones)):
            three.merge([item])
        one.merge(tuple(two))
        two.merge(tuple(one))

    assert one.fingerprint == two.fingerprint == three.fingerprint


OLD_FILE = bytes.fromhex(
    "13768879b6f606ff1ea985980f9f8b1f84a56167656e74d9203230303264326139393138353762653336"
    "306133356230363664333563633938a674656e616e74d920653832343533343930313166643530306636"
    "3363366165656334353062323432a565706f636803a86572617365645f73cb41d954fc40000000"
)


def test_files_of_earlier_versions_are_read():
    assert decode_tombstone(OLD_FILE) == make_tombstone("alice", 3)
    assert encode_tombstone(make_tombstone("alice", 3)) == OLD_FILE


def test_tombstone_reveals_neither_agent_nor_tenant():
    raw = encode_tombstone(make_tombstone("someone@example.com", tenant="family"))

    assert b"someone" not in raw
    assert b"family" not in raw
    assert decode_tombstone(raw) == make_tombstone("someone@example.com", tenant="family")
    assert make_tombstone(tenant="t").agent != make_tombstone(tenant="u").agent


def test_every_damaged_byte_is_detected():
    raw = encode_tombstone(make_tombstone())
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
        ("ab" * 16, 1, 2 * ERASED_S_MAX),
    ],
)
def test_invalid_tombstones_are_rejected(agent, epoch, erased_s):
    with pytest.raises(RejectedError):
        Tombstone(agent, "cd" * 16, epoch, erased_s)
