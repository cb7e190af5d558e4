"""Compare answers from borrowed runs with those of the computed prompt.

    anew    a prompt of documents, computed from its start
    taken   the same prompt, each document from a prompt with other documents before it
    absent  the prompt with its last document only, without knowledge of the others

The cache of a taken document was computed without the text before it. So the benchmark measures the
distance of the next tokens from those of the prompt computed anew, by the number of first tokens of
each document that are recomputed in place; and the distance without the other documents.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from benchmarks.agreement import fill, predict
from benchmarks.models import prose_model, prose_text
from benchmarks.report import Limit, Report, say
from fabric.kvcache.arrangement import Shift
from node.mlx.engine import Engine
from node.mlx.loaded_model import load_model, model_folder
from node.mlx.resident_cache import ResidentCache

DESCRIPTION = "next tokens of caches assembled from other contexts, and of the computed prompt"

MODEL = "prose"
TRIALS, QUICK_TRIALS = 32, 1
DOCUMENTS, DOCUMENT_TOKENS = 4, 128
FOLLOWING_TOKENS = 16  # tokens compared, which follow in the text
HEAD_TOKENS = 8  # of the common head of all prompts
RECOMPUTED = (0, 4, 16, 32, 64)  # of each document
SAME_NATS_MAX = 1e-4
NOTE = "what holds for a model of 3 layers need not hold for a large one, whose layers mix more"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--trials", type=int, default=TRIALS, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default: %(default)s)")


@dataclass(frozen=True, slots=True)
class Trial:
    """Log probabilities `[following tokens, vocabulary]` of each memory."""

    anew: np.ndarray
    absent: np.ndarray
    taken: dict[int, np.ndarray]  # by the number of recomputed tokens of each document


def run(arguments: argparse.Namespace) -> Report:
    """Draw documents, compute every memory, and measure their distances."""
    count = QUICK_TRIALS if arguments.quick else arguments.trials
    engine = load_model(MODEL).engine
    tokenizer = Tokenizer.from_file(str(model_folder(MODEL) / "tokenizer.json"))
    text = [int(t) for t in prose_model.encode(tokenizer, prose_text.held_out_documents())]
    rng = random.Random(arguments.seed)
    trials = []
    for number in range(count):
        trials.append(_trial(engine, text, rng))
        say(f"trial {number + 1} of {count}")
    table = {f"{k} recomputed": _row(trials, [t.taken[k] for t in trials]) for k in RECOMPUTED}
    table["all recomputed"] = _row(trials, [t.taken[DOCUMENT_TOKENS] for t in trials])
    table["absent"] = _row(trials, [t.absent for t in trials])
    limit = Limit(
        "all recomputed, from anew [nats]",
        table["all recomputed"]["from_anew_nats"],
        SAME_NATS_MAX,
        is_least=False,
    )
    parameters = {
        "model": MODEL,
        "trials": count,
        "documents": DOCUMENTS,
        "document_tokens": DOCUMENT_TOKENS,
    }
    return Report(parameters, {"memory": table}, {}, (limit,), (NOTE,))


def _trial(engine: Engine, text: Sequence[int], rng: random.Random) -> Trial:
    head = _drawn(text, rng, HEAD_TOKENS)
    documents = [_drawn(text, rng, DOCUMENT_TOKENS) for _ in range(DOCUMENTS - 1)]
    # The text that follows continues the last document.
    last = _drawn(text, rng, DOCUMENT_TOKENS + FOLLOWING_TOKENS)
    documents.append(last[:DOCUMENT_TOKENS])
    following = last[DOCUMENT_TOKENS - 1 :]
    prompt = [*head, *(token for each in documents for token in each)]
    sources = [_computed(engine, [*head, *_drawn(text, rng, 2 * DOCUMENT_TOKENS), *document])
               for document in documents]  # fmt: skip
    taken = {
        count: predict(engine, _taken(engine, prompt, sources, count), following)
        for count in (*RECOMPUTED, DOCUMENT_TOKENS)
    }
    anew = _computed(engine, prompt[:-1])
    absent = _computed(engine, [*head, *documents[-1]][:-1])
    return Trial(predict(engine, anew, following), predict(engine, absent, following), taken)


def _drawn(text: Sequence[int], rng: random.Random, count: int) -> list[int]:
    start = rng.randrange(len(text) - count)
    return list(text[start : start + count])


def _taken(
    engine: Engine, prompt: Sequence[int], sources: Sequence[ResidentCache], recomputed: int
) -> ResidentCache:
    """Assemble a prompt's cache from other caches, and compute the missing tokens."""
    cache = engine.new_cache(len(prompt) + FOLLOWING_TOKENS)
    spans, shifts = [], []
    for number, source in enumerate(sources):
        new = HEAD_TOKENS + number * DOCUMENT_TOKENS + recomputed
        end = min(HEAD_TOKENS + (number + 1) * DOCUMENT_TOKENS, len(prompt) - 1)
        old = HEAD_TOKENS + 2 * DOCUMENT_TOKENS + recomputed
        if new >= end:
            continue
        for row, theirs in zip(cache.rows(), source.rows(), strict=True):
            row[:, new:end] = theirs[:, old : old + end - new]
        spans.append((new, end))
        shifts.append(Shift(new, end, new - old))
    cache.hold(0, spans, shifts)
    fill(engine, cache, prompt[:-1])
    return cache


def _computed(engine: Engine, ids: Sequence[int]) -> ResidentCache:
    cache = engine.new_cache(len(ids) + FOLLOWING_TOKENS)
    fill(engine, cache, ids)
    cache.settle()
    return cache


def _row(trials: Sequence[Trial], predictions: Sequence[np.ndarray]) -> dict[str, float]:
    apart = [_nats(trial.anew, own) for trial, own in zip(trials, predictions, strict=True)]
    same = [trial.anew.argmax(axis=1) == own.argmax(axis=1)
            for trial, own in zip(trials, predictions, strict=True)]  # fmt: skip
    return {
        "from_anew_nats": float(np.mean(apart)),
        "as_anew": float(np.concatenate(same).mean()),
    }


def _nats(reference: np.ndarray, other: np.ndarray) -> float:
    """Return the mean divergence of `other` from `reference` [nats]."""
    return float((np.exp(reference) * (reference - other)).sum(axis=1).mean())
