"""Prompts of a stated length, none with a common beginning, and their models."""

import argparse
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.chat_client import Message
from benchmarks.large_model import SMALL_LLM, write_model
from benchmarks.report import say
from benchmarks.servers import short_folder

BUNDLED = Path(__file__).resolve().parents[1] / "node" / "bundled"
SYNTHETIC = "synthetic"
QUICK_MODEL = "recall"
_WORDS = (
    *("river", "stone", "lantern", "copper", "meadow", "violin", "harbor", "winter", "saddle"),
    *("orchard", "engine", "letter", "candle", "market", "bridge", "needle", "garden", "silver"),
)
_STRIDE_WORDS = 64
_WORD_CHARS_MIN = 3


def add_model_argument(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Declare `--model` with the choices that `model_folder` takes."""
    usual = default or f"{SYNTHETIC}; with --quick: {QUICK_MODEL}"
    parser.add_argument(
        "--model",
        default=default,
        help=f"a bundled model, a folder that mlx-lm loads, or `{SYNTHETIC}`: random weights in "
        f"the shape of SmolLM2-135M (default: {usual})",
    )


@contextmanager
def model_folder(arguments: argparse.Namespace) -> Iterator[Path]:
    """Provide the folder of the chosen model; a synthetic one is written first."""
    name = arguments.model or (QUICK_MODEL if arguments.quick else SYNTHETIC)
    if name != SYNTHETIC:
        bundled = BUNDLED / name
        yield (bundled if bundled.is_dir() else Path(name)).resolve()
        return
    with short_folder() as folder:
        say("writing a model with random weights")
        yield write_model(folder / SYNTHETIC, SMALL_LLM)


@lru_cache(maxsize=4)
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def text_of(folder: Path, tokens: int, seed: object) -> str:
    """Return a text of about `tokens` tokens; texts of different seeds share no beginning."""
    rng, tokenizer = random.Random(f"{seed}"), _tokenizer(folder)
    words = [f"{rng.getrandbits(48):x}"]
    while (count := len(tokenizer.encode(" ".join(words)).ids)) < tokens:
        stride = max(1, min(_STRIDE_WORDS * 16, (tokens - count) // 6))
        words += (f"{rng.choice(_WORDS)}{rng.randrange(100)}" for _ in range(stride))
    return " ".join(words)


@lru_cache(maxsize=4)
def _own_words(folder: Path) -> tuple[str, ...]:
    words = (name[1:] for name in _tokenizer(folder).get_vocab() if name.startswith("Ġ"))
    return tuple(sorted(word for word in words if len(word) >= _WORD_CHARS_MIN))


def own_words(folder: Path, tokens: int, seed: object) -> str:
    """Return a text of about `tokens` words that are tokens of a synthetic model.

    A token then has four or five bytes, as in most languages and models.
    """
    rng = random.Random(f"{seed}")
    return " ".join(rng.choices(_own_words(folder), k=tokens))


def user(text: str) -> Message:
    """Return a user's message."""
    return {"role": "user", "content": text}
