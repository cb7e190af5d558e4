"""Build or measure the bundled recall model, whose weights are constructed and not trained.

``python -m benchmarks.models.recall`` writes it from a seed, byte for byte the same each time;
``--check`` measures it and writes recall.json and the table in its README. MLX multiplies float32
matrices several times faster with OpenBLAS in LD_PRELOAD; the check needs minutes with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from benchmarks.models import (
    recall_card,
    recall_layout,
    recall_template,
    recall_tokenizer,
    recall_weights,
)

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_OUT = ROOT / "node" / "bundled" / "recall"
SEED = 7
GOOD = 0.99


def _kinds(tokenizer: Tokenizer) -> recall_layout.Kinds:
    """Return the ids of the tokens that the model treats apart."""
    ids = {text: tokenizer.token_to_id(text) for text in (*recall_tokenizer.ADDED, "Ċ", ".")}
    openings = (
        recall_tokenizer.START,
        recall_tokenizer.SYSTEM,
        recall_tokenizer.USER,
        recall_tokenizer.TOOL,
    )
    return recall_layout.Kinds(
        assistant=ids[recall_tokenizer.ASSISTANT],
        roles=[ids[text] for text in openings],
        stops=[ids[recall_tokenizer.END], ids[recall_tokenizer.END_OF_TEXT]],
        line=ids["Ċ"],
        unknown=ids[recall_tokenizer.UNKNOWN],
        noted=ids[recall_tokenizer.NOTED],
        full_stop=ids["."],
    )


def _write_json(path: Path, value: Any) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def weights_digest(out: Path) -> str:
    """Return what a measurement belongs to."""
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def build(out: Path, seed: int = SEED) -> None:
    """Write the model."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = recall_tokenizer.train(seed)
    vocabulary = tokenizer.get_vocab_size()
    end, pad = (
        tokenizer.token_to_id(text) for text in (recall_tokenizer.END, recall_tokenizer.END_OF_TEXT)
    )
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": recall_tokenizer.END,
            "pad_token": recall_tokenizer.END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": recall_layout.POSITIONS,
            "chat_template": recall_template.CHAT_TEMPLATE,
        },
    )
    _write_json(out / "config.json", recall_weights.config(vocabulary, end, pad))
    _write_json(out / "generation_config.json", {"eos_token_id": end, "pad_token_id": pad})
    weights: dict[str, np.ndarray] = dict(
        recall_weights.construct(recall_tokenizer.alike(tokenizer), _kinds(tokenizer), seed)
    )
    save_file(weights, out / "model.safetensors", metadata={"format": "mlx"})
    (out / "model.safetensors").chmod(0o644)  # written for the owner alone
    recall_card.write(out, _measured(out))


def _measured(out: Path) -> dict[str, Any] | None:
    """Return the figures beside a model, if they are that model's."""
    path = out / "recall.json"
    if not path.exists():
        return None
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures if figures["weights"] == weights_digest(out) else None


def check(out: Path, sizes: list[int]) -> bool:
    """Measure a model, write its figures and tell whether they are good."""
    from benchmarks.models import recall_check

    rows = []
    for row in recall_check.table(out, sizes):
        print(*(f"{value!s:>12}" for value in row.values()), flush=True)
        rows.append(row)
    figures = {
        "weights": weights_digest(out),
        "seed": SEED,
        "rows": rows,
        "prefill": recall_check.plain_speed(out),
    }
    print(figures["prefill"])
    _write_json(out / "recall.json", figures)
    recall_card.write(out, figures)
    return all(row["token_accuracy"] >= GOOD for row in rows)


def main() -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description="build or measure the bundled recall model")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the model")
    parser.add_argument("--check", action="store_true", help="measure the model that is there")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[256, 1024, 4096, 8192, 16384],
        help="context lengths to measure at",
    )
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if arguments.check:
        return 0 if check(arguments.out, arguments.sizes) else 1
    build(arguments.out)
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
