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


def stone(agent="alice", epoch=3, age_s=0.0, tenant="t"):
    return tombstone(KEY, tenant, agent, epoch, NOW_S - age_s)


STONES = st.builds(
    stone, st.sampled_from("abcdefgh"), st.integers(1, 4), st.sampled_from([0.0, 5.0, 9.0])
)


@given(st.lists(STONES, max_size=20), st.randoms(use_true_random=False))
def test_sets_are_the_same_in_any_order_and_however_often_merged(stones, random):
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


def test_bounded_and_who_erases_a_lot_forgets_its_own(monkeypatch):
    monkeypatch.setattr(erasure, "TOMBSTONES_MAX", 10)
    kept, flood = Tombstones(), [stone(f"x{i}", age_s=100.0 - i, tenant="loud") for i in range(50)]
    kept.merge([stone("quiet", age_s=1_000.0, tenant="calm")])
    news = kept.merge(flood)

    assert len(kept) == 10
    assert kept.epoch_of(stone("quiet", tenant="calm").agent) == 3
    assert [item.agent for item in news] == [item.agent for item in flood[-9:]]


YEAR_S = 365 * 86_400.0


@pytest.mark.parametrize("jumps_s", [[0.0] * 3, [YEAR_S, 0.0, -YEAR_S], [-NOW_S, YEAR_S, 0.0]])
def test_the_oldest_go_first_whatever_the_calendar_says(monkeypatch, jumps_s):
    monkeypatch.setattr(erasure, "TOMBSTONES_MAX", 2)
    kept, made = Tombstones(), []
    for number, jump_s in enumerate(jumps_s):
        erased_s = kept.next_s(NOW_S + jump_s)
        made.append(tombstone(KEY, "t", f"x{number}", 1, erased_s))
        kept.merge(made[-1:])

    assert sorted(kept, key=lambda item: item.erased_s) == made[1:]
    again = Tombstones()
    again.merge(made)
    assert (tuple(again), again.fingerprint) == (tuple(kept), kept.fingerprint)
    assert kept.merge(made[:1]) == [], "what went does not come back"


def test_a_calendar_at_its_end_ends_no_erasures():
    kept = Tombstones()
    for number in range(3):
        made = tombstone(KEY, "t", f"x{number}", 1, kept.next_s(ERASED_S_MAX))
        assert kept.merge([made]) == [made]


@given(
    st.lists(st.tuples(st.sampled_from("tuv"), st.integers(0, 30)), max_size=40, unique=True),
    st.randoms(use_true_random=False),
)
def test_full_sets_agree_whoever_told_whom_first(names, random):
    """Else two nodes would tell each other the same for ever."""
    stones = [stone(f"{number}", age_s=float(number), tenant=t) for t, number in names]
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
    assert decode_tombstone(OLD_FILE) == stone("alice", 3)
    assert encode_tombstone(stone("alice", 3)) == OLD_FILE


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
        ("ab" * 16, 1, 2 * ERASED_S_MAX),
    ],
)
def test_no_other_tombstones_exist(agent, epoch, erased_s):
    with pytest.raises(RejectedError):
        Tombstone(agent, "cd" * 16, epoch, erased_s)
