"""Match an earlier answer again after an edit of something before it.

Its place, which depends on everything before it, has changed. So it is matched by itself, without
its reasoning, and one neighbour: the message or answer before it, or the answer after it. An answer
that occurs several times is the first, second or last of them while all of them are there; after
that only its calls' ids identify it. A sign that matches two answers matches neither.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from fabric.record.answers import Answers, OmittedParts
from fabric.turn.messages import Message, MessageRole

Signs = tuple[int, ...]  # hashes that each identify an answer
_AFTER_MESSAGE: Final = 1
_AFTER_ANSWER: Final = 2
_BEFORE_ANSWER: Final = 3
_BY_CALL_IDS: Final = 4


def answer_signs(messages: Sequence[Message], digests: Sequence[int]) -> list[Signs]:
    """Return the signs of each message that is an answer; `digests` are of all messages."""
    answers = [at for at, message in enumerate(messages) if message.role is MessageRole.ASSISTANT]
    counts, seen = Counter(digests[at] for at in answers), Counter[int]()
    signs: list[Signs] = [()] * len(messages)
    for number, at in enumerate(answers):
        digest = digests[at]
        identity = (digest, seen[digest], counts[digest])
        seen[digest] += 1
        message_signs = _call_id_signs(messages[at], digest)
        if at:
            message_signs.append(_sign(_AFTER_MESSAGE, *identity, digests[at - 1]))
        if number:
            message_signs.append(_sign(_AFTER_ANSWER, *identity, digests[answers[number - 1]]))
        if number + 1 < len(answers):
            message_signs.append(_sign(_BEFORE_ANSWER, *identity, digests[answers[number + 1]]))
        signs[at] = tuple(message_signs)
    uses = Counter(sign for message_signs in signs for sign in message_signs)
    return [tuple(sign for sign in message_signs if uses[sign] == 1) for message_signs in signs]


def _sign(kind: int, *parts: int) -> int:
    return xxh3_64_intdigest(b"".join(part.to_bytes(8, "little") for part in parts), seed=kind)


def _call_id_signs(answer: Message, digest: int) -> list[int]:
    """Return the sign of an answer by its calls' ids, if all calls have one."""
    ids = [use.id for use in answer.uses]
    if not ids or not all(ids):
        return []
    joined = "\0".join(map(str, ids)).encode("utf-8", "surrogatepass")
    return [_sign(_BY_CALL_IDS, digest, xxh3_64_intdigest(joined))]


def match_answers(signs_at: Mapping[int, Signs], answers: Answers) -> dict[int, OmittedParts]:
    """Return the `answers` that the signs identify without doubt, by the places of the signs."""
    index: dict[int, set[int]] = defaultdict(set)
    for old_place, answer in answers.items():
        for sign in answer.signs:
            index[sign].add(old_place)
    old_places = dict(_old_places(signs_at, index))
    uses = Counter(old_places.values())
    return {place: answers[old] for place, old in old_places.items() if uses[old] == 1}


def _old_places(
    signs_at: Mapping[int, Signs], index: Mapping[int, set[int]]
) -> Iterator[tuple[int, int]]:
    for place, signs in signs_at.items():
        candidates = {old for sign in signs for old in index.get(sign, ())}
        if len(candidates) == 1:
            yield place, candidates.pop()
