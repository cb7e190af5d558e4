"""Train, describe and check the bundled prose language model.

``python -m benchmarks.models.prose`` trains it from the text of the installed Python and writes
weights, tokenizer, figures and README; ``--resume`` continues where a run stopped; ``--check``
measures a finished one again. On Linux, MLX multiplies float32 matrices several times faster with
OpenBLAS in LD_PRELOAD (and OPENBLAS_NUM_THREADS=1); nothing else depends on it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from tokenizers import Tokenizer

from benchmarks.models import prose_card, prose_eval, prose_model, prose_text, prose_train

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_OUT = ROOT / "node" / "bundled" / "prose"
# Optimizer state is three times the weights and of no use to anyone but a resumed run.
DEFAULT_STATE = Path.home() / ".cache" / "macfabric" / "prose-train"
SAME_TEXT, OTHER_TEXT = 0.01, 0.25


def _described(documents: Sequence[prose_text.Document], stream: np.ndarray) -> dict[str, Any]:
    """Return the size of one side of the split."""
    return {
        "documents": len(documents),
        "bytes": sum(len(document.text.encode()) for document in documents),
        "tokens": len(stream),
        "digest": prose_text.digest(documents),
    }


def _stages(minutes: float) -> list[prose_train.Stage]:
    """Return the stages with their time limits scaled to ``minutes`` in all."""
    scale = minutes / sum(stage.minutes for stage in prose_train.STAGES)
    return [replace(stage, minutes=stage.minutes * scale) for stage in prose_train.STAGES]


def _run(done: list[prose_train.Progress], seed: int, note: str) -> dict[str, Any]:
    """Return what the card says about the training."""
    stages = [
        {
            "name": stage.name,
            "steps": progress.step,
            "tokens": progress.tokens,
            "minutes": round(progress.seconds / 60, 1),
            "loss": progress.curve,
        }
        for stage, progress in zip(prose_train.STAGES, done, strict=True)
    ]
    return {"seed": seed, "note": note, "stages": stages}


def _build(arguments: argparse.Namespace) -> None:
    """Train and write everything."""
    out, seed = arguments.out, arguments.seed
    print("reading the installed Python's prose", flush=True)
    held_out, training = prose_text.held_out_documents(), prose_text.training_documents()
    tokenizer = prose_model.train_tokenizer(training)
    streams = {
        "held_out": prose_model.encode(tokenizer, held_out),
        "training": prose_model.encode(tokenizer, training),
    }
    model = prose_model.new_model(seed)
    done = prose_train.train(
        model,
        streams["training"],
        _stages(arguments.minutes),
        arguments.state,
        seed=seed,
        resume=arguments.resume,
        export=lambda: prose_card.export(out, model, tokenizer),
    )
    print("measuring", flush=True)
    # What is measured is what was written, through the loader that all use.
    loaded, wrapped = mlx_lm.load(str(out))
    prose_card.write_card(
        out,
        {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "mlx": mx.__version__,
            "parameters": prose_card.parameter_count(loaded),
            "weights": prose_card.weights_digest(out),
            "training": _described(training, streams["training"]),
            "held_out": _described(held_out, streams["held_out"]),
            "run": _run(done, seed, arguments.note),
            "figures": prose_eval.figures(
                loaded, tokenizer, streams["held_out"], streams["training"]
            ),
            "samples": prose_eval.samples(loaded, wrapped),
        },
    )


def check(out: Path) -> list[str]:
    """Measure a finished model again and return what is wrong with its figures."""
    card = json.loads((out / "prose.json").read_text(encoding="utf-8"))
    if card["weights"] != prose_card.weights_digest(out):
        return ["prose.json describes other weights than those beside it"]
    documents = prose_text.held_out_documents()
    same = prose_text.digest(documents) == card["held_out"]["digest"]
    if not same:
        print(f"held-out text differs from that of Python {card['python']}: wide tolerance")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    chosen = prose_eval.windows(prose_model.encode(tokenizer, documents))
    model, _ = mlx_lm.load(str(out))
    wrong = []
    for kind in ("full", "q4_g64"):
        losses = prose_eval.token_losses(model, chosen, kind)
        found = prose_eval.summary(losses, chosen, prose_eval.byte_lengths(tokenizer))
        stated = card["figures"]["held_out"][kind]
        print(f"{kind}: found {found}, stated {stated}")
        drift = abs(found["perplexity"] / stated["perplexity"] - 1)
        if drift > (SAME_TEXT if same else OTHER_TEXT):
            wrong.append(f"{kind}: perplexity is off by {100 * drift:.1f} %")
    return wrong


def _arguments() -> argparse.Namespace:
    """Parse the command line."""
    minutes = sum(stage.minutes for stage in prose_train.STAGES)
    parser = argparse.ArgumentParser(description="train the bundled prose language model")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the model")
    parser.add_argument("--state", type=Path, default=DEFAULT_STATE, help="folder for resuming")
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="time limit, if the steps take longer"
    )
    parser.add_argument("--seed", type=int, default=prose_train.SEED)
    parser.add_argument("--note", default="", help="a paragraph on this run for the README")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--check", action="store_true", help="measure a finished model again")
    return parser.parse_args()


def main() -> int:
    """Run the command line and return its exit status."""
    arguments = _arguments()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if arguments.check:
        wrong = check(arguments.out)
        print(*(wrong or ["ok"]), sep="\n")
        return 1 if wrong else 0
    _build(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
