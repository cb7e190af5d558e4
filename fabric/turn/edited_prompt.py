"""Match an edited prompt against an agent's record, so that tokens after the edits are reused too.

    stored   |system|user|call|result ............|user|answer|
    prompt   |system|user|call|[cleared]|user|answer|user|
              ------ same ----           -- moved --

Both are cut into chunks at special tokens, where tokenizers cut as well: a prompt chunk whose text
occurs in the record can take the record's tokens.

Within an edited message, tokens are aligned one by one:

    old   a a a a b b c c c c c d d e e e e
    new   a a a a x   c c c c c     e e e e      kept: a, c and e

Anchors are runs that occur once in both, as in `alignment.py`; the search repeats between anchors,
at most three times, on arrays: 100k tokens take a third of a second in the worst case.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from fabric.kvcache.arrangement import Move
from fabric.limits import EDIT_CHUNKS_MAX, EDIT_KEPT_TOKENS_MIN, EDIT_MOVES_MAX, EDIT_SINK_TOKENS
from fabric.turn.alignment import Run, add_run, align_chunks, common_prefix, longest_ascending
from fabric.turn.chunks import Tokens, common_tokens
from fabric.turn.generation import MatchKind
from fabric.turn.prompt_plan import PromptPlan, Transcript

_LEVELS: Final = 3  # of anchors between anchors; each level looks at all remaining tokens
_FACTOR: Final = np.uint64(0x9E37_79B9_7F4A_7C15)  # odd: no token's bits are lost


def aligned_tokens(old: Sequence[int], new: Sequence[int]) -> list[Run]:
    """List the common runs of at least `EDIT_KEPT_TOKENS_MIN` tokens, ascending in both."""
    a, b = np.asarray(old, np.uint32), np.asarray(new, np.uint32)
    runs: list[Run] = []
    for run in _common_runs(a, b, 0, 0, _LEVELS):
        add_run(runs, run)
    return [run for run in runs if run.count >= EDIT_KEPT_TOKENS_MIN]


def _common_runs(a: Tokens, b: Tokens, old: int, new: int, levels: int) -> Iterator[Run]:
    """Yield the common runs of any length; `a` starts at token `old`, `b` at token `new`."""
    prefix = common_tokens(a, b)
    if prefix:
        yield Run(old, new, prefix)
    a, b, old, new = a[prefix:], b[prefix:], old + prefix, new + prefix
    suffix = common_tokens(a[::-1], b[::-1])
    a_end, b_end = len(a) - suffix, len(b) - suffix
    if levels and min(a_end, b_end) >= EDIT_KEPT_TOKENS_MIN:
        anchors = _anchors(a[:a_end], b[:b_end])
        edges = [Run(0, 0, 0), *anchors, Run(a_end, b_end, 0)]
        for before, after in pairwise(edges) if anchors else ():
            start, new_start = before.old_end, before.new_end
            within = a[start : after.old], b[new_start : after.new]
            yield from _common_runs(*within, old + start, new + new_start, levels - 1)
            if after.count:
                yield Run(old + after.old, new + after.new, after.count)
    if suffix:
        yield Run(old + a_end, new + b_end, suffix)


def _anchors(a: Tokens, b: Tokens) -> list[Run]:
    """Return the runs that occur once in each, as many of them as ascend in both."""
    sums, new_sums = _run_hashes(a), _run_hashes(b)
    places, new_places = _unique_places(sums), _unique_places(new_sums)
    _, at, new_at = np.intersect1d(
        sums[places], new_sums[new_places], assume_unique=True, return_indices=True
    )
    pairs = sorted(zip(places[at].tolist(), new_places[new_at].tolist(), strict=True))
    runs: list[Run] = []
    for place, new_place in longest_ascending(pairs):
        last = runs[-1] if runs else Run(0, 0, 0)
        skipped = max(0, last.old_end - place, last.new_end - new_place)
        count = EDIT_KEPT_TOKENS_MIN - skipped
        start, new_start = place + skipped, new_place + skipped
        if count <= 0:
            continue
        add_run(runs, Run(start, new_start, count))
    return [run for run in runs if _is_equal(a, b, run)]


def _run_hashes(tokens: Tokens) -> npt.NDArray[np.uint64]:
    """Return a hash of each run of `EDIT_KEPT_TOKENS_MIN` tokens."""
    count = len(tokens) - EDIT_KEPT_TOKENS_MIN + 1
    wide = tokens.astype(np.uint64)
    sums = np.zeros(count, np.uint64)
    for at in range(EDIT_KEPT_TOKENS_MIN):
        sums = (sums + wide[at : at + count] + np.uint64(1)) * _FACTOR
        sums ^= sums >> np.uint64(29)
    return sums


def _unique_places(sums: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """Return the indexes of hashes that occur once."""
    _, places, counts = np.unique(sums, return_index=True, return_counts=True)
    once: npt.NDArray[np.intp] = places[counts == 1]
    return once


def _is_equal(a: Tokens, b: Tokens, run: Run) -> bool:
    """Return whether the tokens of a run are equal, not only their hashes."""
    return bool(np.array_equal(a[run.old : run.old_end], b[run.new : run.new_end]))


Edit: TypeAlias = tuple[int, int, int]  # start and end in a record's text, and new size; bytes


@dataclass(frozen=True, slots=True)
class _PlannedTokens:
    """Tokens of the planned prompt; `old` has each token's index in the record, -1 for new ones."""

    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    old: list[int] = field(default_factory=list)

    def keep(self, stored: Transcript, start: int, end: int, shift_bytes: int) -> None:
        """Append tokens of the record; their text moves by `shift_bytes`."""
        self.ids.extend(stored.ids[start:end])
        self.ends.extend(at + shift_bytes for at in stored.ends[start:end])
        self.old.extend(range(start, end))

    def take(self, plan: PromptPlan, start: int, end: int) -> None:
        """Append freshly encoded tokens of the prompt."""
        self.ids.extend(plan.ids[start:end])
        self.ends.extend(plan.ends[start:end])
        self.old.extend(-1 for _ in range(start, end))


def plan_edited_prompt(
    plan: PromptPlan,
    stored: Transcript,
    cuts: Collection[int],
    recomputed_tokens: int = 0,
    known_edits: Sequence[Edit] = (),
    control: Collection[int] = (),
) -> PromptPlan | None:
    """Plan to reuse tokens of `stored` after the edits in `plan`; None if there are none.

    `cuts`: special tokens that tokenizers never merge. `recomputed_tokens`: how many tokens after
    each edit are recomputed. `known_edits`: replacements of directives in the record's text, in
    order. `control`: tokens whose texts may also be plain text.
    """
    tokens = _assemble_tokens(plan, stored, cuts, control)
    if tokens is not None:
        _align(tokens, stored, cuts, known_edits)
    moves = _moves(tokens, recomputed_tokens) if tokens is not None else ()
    if tokens is None or len(moves) < 2:
        return None
    kept = sum(move.end - move.start for move in moves[1:])
    reason = f"keeps {kept} tokens after {len(moves) - 1} edits, the first at {moves[0].end}"
    return replace(
        plan,
        ids=tokens.ids,
        ends=tokens.ends,
        kept_tokens=moves[0].end,
        match=MatchKind.EDIT,
        reason=reason,
        moves=moves,
    )


def _assemble_tokens(
    plan: PromptPlan, stored: Transcript, cuts: Collection[int], control: Collection[int]
) -> _PlannedTokens | None:
    """Return the prompt's tokens, using the record's tokens for chunks with the same text.

    Chunks with the same text and other control tokens are different.
    """
    common = range(plan.kept_tokens - 1, EDIT_SINK_TOKENS - 1, -1)
    first = next((at for at in common if stored.ids[at] in cuts), None)
    if first is None:
        return None
    old = [at for at in range(first, len(stored.ids)) if stored.ids[at] in cuts]
    new = [at for at in range(first, len(plan.ids)) if plan.ids[at] in cuts]
    if max(len(old), len(new)) > EDIT_CHUNKS_MAX:
        return None
    old.append(len(stored.ids))
    new.append(len(plan.ids))
    tokens, taken_count = _PlannedTokens(), first
    tokens.keep(stored, 0, first, 0)
    for run in align_chunks(_chunks(stored, old, control), _chunks(plan, new, control)):
        start, end = old[run.old], old[run.old + run.count]
        if end - start < EDIT_KEPT_TOKENS_MIN:
            continue
        tokens.take(plan, taken_count, new[run.new])
        shift_bytes = plan.ends[new[run.new] - 1] - stored.ends[start - 1]
        tokens.keep(stored, start, end, shift_bytes)
        taken_count = new[run.new + run.count]
    tokens.take(plan, taken_count, len(plan.ids))
    return tokens


def _chunks(
    prompt: PromptPlan | Transcript, edges: Sequence[int], control: Collection[int]
) -> list[bytes]:
    """Return the texts between the tokens at `edges`, each with its control tokens."""
    return [
        b"".join(b"%d," % token for token in prompt.ids[a:b] if token in control)
        + b":"
        + prompt.text[prompt.ends[a - 1] : prompt.ends[b - 1]]
        for a, b in pairwise(edges)
    ]


def _align(
    tokens: _PlannedTokens, stored: Transcript, cuts: Collection[int], known_edits: Sequence[Edit]
) -> None:
    """Mark more tokens as the record's: those that equal freshly encoded ones."""
    _extend_runs(tokens, stored)
    _keep_between(tokens, stored, known_edits)
    _refine(tokens, stored, cuts)
    _prefer_in_place(tokens, stored)


def _moves(tokens: _PlannedTokens, recomputed_tokens: int) -> tuple[Move, ...]:
    """Return the moves of the record's tokens to their positions in the prompt."""
    moves = list(_runs_of(tokens.old))
    if not moves or moves[0].start != 0 or moves[0].new_start != 0:
        return ()
    kept = [moves[0]]
    for move in moves[1:]:
        start, by = move.start + recomputed_tokens, move.new_start - move.start
        # The prompt's last token is always computed, for the logits of the next one.
        end = min(move.end, len(tokens.ids) - 1 - by)
        if end - start >= EDIT_KEPT_TOKENS_MIN:
            kept.append(Move(start, end, start + by))
    longest = sorted(kept[1:], key=lambda move: move.end - move.start)[-EDIT_MOVES_MAX + 1 :]
    return (kept[0], *sorted(longest, key=lambda move: move.start))


def _extend_runs(tokens: _PlannedTokens, stored: Transcript) -> None:
    """Extend each run of kept tokens by equal tokens beside it: an edit may be inside a message."""
    ids, old = tokens.ids, tokens.old
    for first, last in list(_new_ranges(old)):
        place = old[first - 1] + 1 if first else 0
        until = old[last] if last < len(old) else len(stored.ids)
        room = min(last - first, until - place)
        prefix = common_prefix(ids[first : first + room], stored.ids[place : place + room])
        old[first : first + prefix] = range(place, place + prefix)
        room -= prefix
        if last < len(old) and room:
            suffix = common_prefix(
                ids[last - room : last][::-1], stored.ids[until - room : until][::-1]
            )
            old[last - suffix : last] = range(until - suffix, until)


def _keep_between(tokens: _PlannedTokens, stored: Transcript, edits: Sequence[Edit]) -> None:
    """Keep tokens between known edits, even if lines repeat, so that there are no anchors."""
    for first, last in list(_new_ranges(tokens.old)) if edits else ():
        place = tokens.old[first - 1] + 1 if first else 0
        until = tokens.old[last] if last < len(tokens.old) else len(stored.ids)
        low = stored.ends[place - 1] if place else 0
        shift_bytes = (tokens.ends[first - 1] if first else 0) - low
        after = [edit for edit in edits if edit[1] > low]
        for start, end, size_bytes in (*after, (stored.ends[-1], stored.ends[-1], 0)):
            at = bisect_right(tokens.ends, low + shift_bytes, first, last)
            at_end = bisect_right(tokens.ends, start + shift_bytes, at, last)
            for number in range(at, at_end):
                old_end = tokens.ends[number] - shift_bytes
                old = bisect_left(stored.ends, old_end, place, until)
                if old == until:
                    break
                if (stored.ends[old], stored.ids[old]) == (old_end, tokens.ids[number]):
                    tokens.old[number], place = old, old + 1
            shift_bytes += size_bytes - (end - start)
            low = end


def _refine(tokens: _PlannedTokens, stored: Transcript, cuts: Collection[int]) -> None:
    """Keep tokens between several edits of one message.

    Texts between the same special tokens are the old and the new version of one message.
    """
    ids, old = tokens.ids, tokens.old
    for first, last in list(_new_ranges(old)):
        place = old[first - 1] + 1 if first else 0
        until = old[last] if last < len(old) else len(stored.ids)
        if min(last - first, until - place) < EDIT_KEPT_TOKENS_MIN:
            continue
        edges = [first, *(at for at in range(first, last) if ids[at] in cuts), last]
        olds = [place, *(at for at in range(place, until) if stored.ids[at] in cuts), until]
        if [ids[at] for at in edges[1:-1]] != [stored.ids[at] for at in olds[1:-1]]:
            continue
        for (start, end), (old_start, old_end) in zip(pairwise(edges), pairwise(olds), strict=True):
            for run in aligned_tokens(stored.ids[old_start:old_end], ids[start:end]):
                at, was = start + run.new, old_start + run.old
                old[at : at + run.count] = range(was, was + run.count)


def _prefer_in_place(tokens: _PlannedTokens, stored: Transcript) -> None:
    """Prefer tokens in place over equal moved ones, with which a removed part may begin."""
    first, second, *_ = (*_runs_of(tokens.old), None, None)
    if first is None or second is None or first.start or first.new_start:
        return
    old, same = tokens.old, common_prefix(tokens.ids[: second.new_end], stored.ids)
    old[:same] = range(same)
    for at in range(same, len(old)):
        if old[at] >= same:
            break
        old[at] = -1  # a token of the record cannot be used twice


def _new_ranges(old: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of new tokens."""
    start = None
    for at, place in enumerate([*old, 0]):
        if place < 0 and start is None:
            start = at
        elif place >= 0 and start is not None:
            yield start, min(at, len(old))
            start = None


def _runs_of(old: Sequence[int]) -> Iterator[Move]:
    start = 0
    for at in range(1, len(old) + 1):
        if at < len(old) and old[at] >= 0 and old[at] == old[at - 1] + 1:
            continue
        if old[start] >= 0:
            yield Move(old[start], old[at - 1] + 1, start)
        start = at
