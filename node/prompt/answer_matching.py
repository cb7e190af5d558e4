"""Know an earlier answer again where something before it was edited.

Its place, which hangs on all that was said before, is another one then. What is left to know it by
is itself, reasoning apart, beside one of its neighbours: the message or the answer before it, or
the answer behind it. An answer that was given several times is the first, second or last of them
as long as all of them are there; else only the ids of its calls tell it. Whatever may be meant by
two is meant by neither.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from fabric.record.answers import Answered, Answers
from fabric.turn.messages import Message, MessageRole

Signs = tuple[int, ...]  # hashes, any of which tells an answer from all others
_ASKED: Final = 1
_BEFORE: Final = 2
_BEHIND: Final = 3
_NAMED: Final = 4


def signs(messages: Sequence[Message], said: Sequence[int]) -> list[Signs]:
    """Return for each of `messages` that is an answer its signs; `said` are digests of them all."""
    answers = [at for at, each in enumerate(messages) if each.role is MessageRole.ASSISTANT]
    times, sooner = Counter(said[at] for at in answers), Counter[int]()
    found: list[Signs] = [()] * len(messages)
    for number, at in enumerate(answers):
        digest = said[at]
        own = (digest, sooner[digest], times[digest])
        sooner[digest] += 1
        made = _named(messages[at], digest)
        if at:
            made.append(_sign(_ASKED, *own, said[at - 1]))
        if number:
            made.append(_sign(_BEFORE, *own, said[answers[number - 1]]))
        if number + 1 < len(answers):
            made.append(_sign(_BEHIND, *own, said[answers[number + 1]]))
        found[at] = tuple(made)
    counts = Counter(sign for each in found for sign in each)
    return [tuple(sign for sign in each if counts[sign] == 1) for each in found]


def _sign(kind: int, *parts: int) -> int:
    return xxh3_64_intdigest(b"".join(part.to_bytes(8, "little") for part in parts), seed=kind)


def _named(answer: Message, own: int) -> list[int]:
    """Return the sign of an answer by its calls' ids, if they have some."""
    ids = [use.id for use in answer.uses]
    if not ids or not all(ids):
        return []
    spelled = "\0".join(map(str, ids)).encode("utf-8", "surrogatepass")
    return [_sign(_NAMED, own, xxh3_64_intdigest(spelled))]


def known_again(signs_at: Mapping[int, Signs], said: Answers) -> dict[int, Answered]:
    """Return those of an agent's answers that `signs_at`, by place, clearly tell; by these places.

    `said` are the answers that are not known by their places.
    """
    index: dict[int, set[int]] = defaultdict(set)
    for old, answered in said.items():
        for sign in answered.signs:
            index[sign].add(old)
    told = dict(_told(signs_at, index))
    times = Counter(told.values())
    return {place: said[old] for place, old in told.items() if times[old] == 1}


def _told(
    signs_at: Mapping[int, Signs], index: Mapping[int, set[int]]
) -> Iterator[tuple[int, int]]:
    for place, each in signs_at.items():
        meant = {old for sign in each for old in index.get(sign, ())}
        if len(meant) == 1:
            yield place, meant.pop()
