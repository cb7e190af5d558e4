"""Compare answers of an edited cache with both references, on the bundled trained model.

    full   the original prompt, with the text that the edits remove
    anew   the edited prompt, computed from its start
    kept   the edited prompt, with the cache behind the edits kept and moved

A kept cache should have the positions of the edited prompt and the knowledge of the full one. So
the benchmark measures the distances of all three, and the reference that is matched where the two
differ: for each of the following tokens, on text that the model has not seen, for several numbers
of tokens recomputed behind each edit, and for several choices of such tokens at equal budgets.
"""

import argparse
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

from benchmarks.models import prose_model, prose_text
from benchmarks.recomputed_tokens import CHOICES, SHARES, choose_tokens, deviations, remaining_moves
from benchmarks.report import Limit, Report, say
from fabric.kvcache.arrangement import Move
from node.mlx.engine import Engine
from node.mlx.loaded_model import load_model, model_folder
from node.mlx.resident_cache import ResidentCache

DESCRIPTION = "next tokens of edited caches, compared with the full and the recomputed prompt"

MODEL = "prose"
TRIALS, QUICK_TRIALS = 48, 1
PROMPT_TOKENS, QUICK_PROMPT_TOKENS = 512, 192
FOLLOWING_TOKENS = 16  # tokens compared, which follow in the text
RECOMPUTED = (0, 4, 16, 64)  # behind each edit
ALL = "all recomputed"
EDITS_MAX = 8
DROPPED_TOKENS = (8, 32)
ADDED_TOKENS_MAX = 24  # both longer and shorter than the replaced text
SINK_TOKENS, NEAR_TOKENS = 8, 8
CHUNK = 256
SAME_NATS_MAX = 1e-4
NOTE = "what holds for a model of 3 layers need not hold for a large one, whose layers mix more"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--trials", type=int, default=TRIALS, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the edits (default: %(default)s)")


@dataclass(frozen=True, slots=True)
class Edit:
    """Replacement of the tokens `start:end` of a prompt."""

    start: int
    end: int
    added: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """Log probabilities `[following tokens, vocabulary]` of each memory."""

    full: np.ndarray
    anew: np.ndarray
    kept: dict[str, np.ndarray]  # by choice of recomputed tokens


def run(arguments: argparse.Namespace) -> Report:
    """Draw edits, compute every memory, and count agreements."""
    quick = arguments.quick
    count = QUICK_TRIALS if quick else arguments.trials
    length = QUICK_PROMPT_TOKENS if quick else PROMPT_TOKENS
    engine = load_model(MODEL).engine
    tokenizer = Tokenizer.from_file(str(model_folder(MODEL) / "tokenizer.json"))
    text = [int(t) for t in prose_model.encode(tokenizer, prose_text.held_out_documents())]
    rng = random.Random(arguments.seed)
    trials = []
    for number in range(count):
        start = rng.randrange(len(text) - length - FOLLOWING_TOKENS)
        prompt = text[start : start + length + FOLLOWING_TOKENS]
        trials.append(_trial(engine, prompt, _edits(rng, length, text)))
        say(f"trial {number + 1} of {count}")
    table = {arm: _row(trials, arm) for arm in trials[0].kept}
    limit = Limit(
        f"{ALL}, from anew [nats]",
        table[ALL]["from_anew_nats"],
        SAME_NATS_MAX,
        is_least=False,
    )
    parameters = {"model": MODEL, "trials": count, "prompt_tokens": length, "edits_max": EDITS_MAX}
    return Report(parameters, {"memory": table}, _references(trials), (limit,), (NOTE,))


def _edits(rng: random.Random, length: int, text: Sequence[int]) -> list[Edit]:
    """Draw up to eight edits, none at the start and none at the very end."""
    edits: list[Edit] = []
    at = SINK_TOKENS
    for _ in range(rng.randint(1, EDITS_MAX)):
        start = at + rng.randrange(NEAR_TOKENS, length // EDITS_MAX)
        end = start + rng.randint(*DROPPED_TOKENS)
        if end + NEAR_TOKENS >= length - 1:
            break
        other = rng.randrange(len(text) - ADDED_TOKENS_MAX)
        edits.append(
            Edit(start, end, tuple(text[other : other + rng.randint(0, ADDED_TOKENS_MAX)]))
        )
        at = end
    return edits or [Edit(SINK_TOKENS + 1, SINK_TOKENS + 9, ())]


def _trial(engine: Engine, prompt: Sequence[int], edits: Sequence[Edit]) -> Trial:
    original, following = list(prompt[:-FOLLOWING_TOKENS]), list(prompt[-FOLLOWING_TOKENS - 1 :])
    edited, _ = _edited(original, edits, 0)
    full, anew = (_computed(engine, ids[:-1]) for ids in (original, edited))
    kept = {}
    for arm, arranged in _arms(engine, original, edited, edits).items():
        cache = _copied(engine, full, len(original) + len(edited))
        cache.rearrange(arranged)
        fill(engine, cache, edited[:-1])
        kept[arm] = predict(engine, cache, following)
    return Trial(predict(engine, full, following), predict(engine, anew, following), kept)


def _arms(
    engine: Engine, original: Sequence[int], edited: Sequence[int], edits: Sequence[Edit]
) -> dict[str, list[Move]]:
    """Return the kept and moved tokens for each choice of tokens to recompute."""
    arms = {f"{k} recomputed": _edited(original, edits, k)[1] for k in RECOMPUTED}
    _, moves = _edited(original, edits, 0)
    found = deviations(engine.model, original[:-1], edited[:-1], moves)
    for choice, share in product(CHOICES, SHARES):
        picked = choose_tokens(choice, share, moves, found)
        arms[f"{choice} {share:.0%}"] = remaining_moves(moves, picked)
    return {**arms, ALL: moves[:1]}


def _edited(
    original: Sequence[int], edits: Sequence[Edit], recomputed: int
) -> tuple[list[int], list[Move]]:
    """Return the edited prompt, and the kept and moved tokens of the old one, without the last."""
    ids: list[int] = []
    moves: list[Move] = []
    bounds = [(0, 0), *((edit.start, edit.end) for edit in edits), (len(original), len(original))]
    added = [(), *(edit.added for edit in edits)]
    for index, ((_, start), (end, _)) in enumerate(pairwise(bounds)):
        ids += added[index]
        skipped = min(recomputed, end - start) if index else 0
        last = min(end, len(original) - 1)
        if start + skipped < last:
            moves.append(Move(start + skipped, last, len(ids) + skipped))
        ids += original[start:end]
    return ids, moves


def _computed(engine: Engine, ids: Sequence[int]) -> ResidentCache:
    cache = engine.new_cache(len(ids) + FOLLOWING_TOKENS)
    fill(engine, cache, ids)
    return cache


def _copied(engine: Engine, cache: ResidentCache, room_tokens: int) -> ResidentCache:
    """Return a cache with the same rows."""
    count = cache.tokens_count
    copy = engine.new_cache(room_tokens + FOLLOWING_TOKENS)
    copy.settle()
    for view, rows in zip(copy.places(0, count), cache.places(0, count), strict=True):
        view[:] = rows
    copy.assume(count)
    return copy


def fill(engine: Engine, cache: ResidentCache, ids: Sequence[int]) -> None:
    """Prefill the tokens that the cache lacks."""
    while (at := cache.tokens_count) < len(ids):
        until = cache.ahead[0][0] if cache.ahead else len(ids)
        engine.prefill(cache, list(ids[at : min(at + CHUNK, until)]))


def predict(engine: Engine, cache: ResidentCache, following: Sequence[int]) -> np.ndarray:
    """Return the log probabilities of the token after each one, fed one by one."""
    rows = []
    for token in following[:-1]:
        logits = engine.feed([cache], [mx.array([token], mx.uint32)])[0].astype(mx.float32)
        rows.append(logits - mx.logsumexp(logits))
    found: np.ndarray = np.array(mx.stack(rows))
    return found


# --- distances -------------------------------------------------------------------------------


def _row(trials: Sequence[Trial], arm: str) -> dict[str, float]:
    """Compare memories with some recomputed tokens with both references."""
    pairs = [(trial.kept[arm], trial) for trial in trials]
    apart = [_top(t.full) != _top(t.anew) for t in trials]
    differ = np.concatenate(apart)
    as_full = np.concatenate([_top(own) == _top(t.full) for own, t in pairs])
    as_anew = np.concatenate([_top(own) == _top(t.anew) for own, t in pairs])
    return {
        "from_full_nats": _mean(_kl(t.full, own) for own, t in pairs),
        "from_anew_nats": _mean(_kl(t.anew, own) for own, t in pairs),
        "as_full": float(as_full.mean()),
        "as_anew": float(as_anew.mean()),
        "as_full_where_they_differ": float(as_full[differ].mean()) if differ.any() else 1.0,
        "as_anew_where_they_differ": float(as_anew[differ].mean()) if differ.any() else 0.0,
    }


def _references(trials: Sequence[Trial]) -> dict[str, float]:
    differ = np.concatenate([_top(t.full) != _top(t.anew) for t in trials])
    return {
        "tokens where the references differ": float(differ.mean()),
        "anew from full [nats]": _mean(_kl(t.full, t.anew) for t in trials),
    }


def _top(rows: np.ndarray) -> np.ndarray:
    best: np.ndarray = rows.argmax(axis=1)
    return best


def _kl(reference: np.ndarray, other: np.ndarray) -> float:
    """Return the mean divergence of `other` from `reference` [nats]."""
    return float((np.exp(reference) * (reference - other)).sum(axis=1).mean())


def _mean(numbers: Iterable[float]) -> float:
    return float(np.mean(list(numbers)))
