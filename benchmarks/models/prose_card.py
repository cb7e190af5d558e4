"""Write the folder of the prose model: weights, configuration, tokenizer, figures, README."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer

from benchmarks.models.prose_eval import PASSAGE, TAIL
from benchmarks.models.prose_model import CONFIG, EOS

# No turns, no markers: the model knows none, so a chat is just its contents, one after another.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- message['content'] -}}{%- if not loop.last -%}{{- '\\n\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
)

README = """\
# prose: a small trained language model

For one purpose: perplexity and fidelity figures when the KV cache is quantized, on text that any
machine with Python can read and that the model never saw. It is not an assistant, answers
nothing, knows nothing, and must not be used as either.

Made by `python -m benchmarks.models.prose`; the figures below are those of `prose.json`, written
by the same run. `--check` measures them again.

## What it is
Llama architecture, float32, {parameters:,} parameters: {layers} layers, hidden {hidden},
{heads} query heads and {kv_heads} KV heads of {head_dim}, tied embeddings, byte-level BPE of
{vocabulary:,} tokens ({bytes_per_token:.2f} bytes each on held-out text). Loads with plain
`mlx_lm.load`. The chat template only joins contents with an empty line.
`max_position_embeddings` is {positions:,}, but the model was trained on windows of up to 1,024
tokens; beyond that its figures are extrapolation.

## What it was trained on
English prose of the CPython {python} installation, read from it at training time: the topics of
`pydoc_data.topics`, and the docstrings and comment blocks of the standard library's modules. That
text is under the PSF licence (some modules carry other permissive notices, listed in Python's own
licence document). None of it is in this repository; the weights and the tokenizer are.

| | documents | bytes | tokens |
|---|---|---|---|
| training | {t[documents]:,} | {t[bytes]:,} | {t[tokens]:,} |
| held out | {h[documents]:,} | {h[bytes]:,} | {h[tokens]:,} |

A document is a topic or a whole module. Which side it is on depends on a hash of its name alone.
Training paragraphs that share any ten-word run with held-out text were dropped, and Python's own
tests (often not installed) are only trained on. Weights and figures belong to that Python version;
under another one the held-out text differs a little and `--check` says so.

## How it was trained
Seed {seed}, AdamW, one CPU thread, {tokens:,} tokens in all ({epochs:.1f} passes over the text);
each stage has its own warm-up and cosine and ends with windows of 1,024 tokens. In the stage
*copies* half of the windows have a passage that comes a second time at a random place: after
*plain*, more than 128 tokens of context hardly helped, and with a model that does not look back
a damaged cache would look harmless.

{stages}
{note}
## Figures
{m[windows]} windows of {m[window]:,} tokens, all of the held-out text; each token is predicted from
the start of its window, and the cache holds the stated form from the first token on. The training
row takes as many windows spread over the training text.

| | perplexity per token | bits per byte |
|---|---|---|
{rows}

The best unigram model fitted to the held-out tokens themselves has {m[unigram_perplexity]}.

The same held-out tokens (the last {tail} of every window) with fewer or more tokens before them,
full precision; if more context did not help, a cache would not matter:

| tokens of context | {contexts} |
|---|{contexts_rule}
| perplexity | {by_context} |

What quantization costs by place in the window (read down; across, the text differs):

| positions | {spans} |
|---|{rule}
| full | {full} |
| Q4, groups of 64 | {q4} |

Held-out passages of {passage} tokens, read the first time and a second time after other text:

| | first | again at once | after 200 tokens | after 700 |
|---|---|---|---|---|
{readings}

## Limits
Small, and trained for minutes: it writes phrases, not sense. It copies from its context only in
part, and less the farther back; for exact recall there is `../recall`, whose weights are
constructed. What 4-bit KV costs depends on the model (large ones have outlier channels), so these
figures can show that a cache path does what quantization must do, not what it will cost elsewhere.

## Samples
{samples}
"""

ROWS = {
    "full": "held out, full-precision KV",
    "q8_g64": "held out, Q8 KV, groups of 64",
    "q4_g32": "held out, Q4 KV, groups of 32",
    "q4_g64": "held out, Q4 KV, groups of 64",
}


def _write_json(path: Path, value: Any) -> None:
    """Write a JSON file in the form that diffs well."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def export(out: Path, model: llama.Model, tokenizer: Tokenizer) -> None:
    """Write a folder that plain ``mlx_lm.load`` takes."""
    out.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    partial = out / ".weights.safetensors"
    mx.save_safetensors(str(partial), weights, {"format": "mlx"})
    partial.replace(out / "model.safetensors")
    _write_json(out / "config.json", CONFIG)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": EOS,
            "pad_token": EOS,
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def weights_digest(out: Path) -> str:
    """Return a digest that ties the figures to the weights they were measured on."""
    return hashlib.blake2b((out / "model.safetensors").read_bytes(), digest_size=16).hexdigest()


def parameter_count(model: llama.Model) -> int:
    """Return the number of weights."""
    return sum(array.size for _, array in tree_flatten(model.parameters()))


def _curve(points: list[list[float]], wanted: int = 6) -> str:
    """Return a few points of the loss curve in words."""
    step = max(1, len(points) // wanted)
    chosen = points[::step]
    if chosen[-1] is not points[-1]:
        chosen.append(points[-1])
    return ", ".join(f"{loss:.2f} at {int(at):,}" for at, loss in chosen)


def _stages(run: dict[str, Any]) -> str:
    """Return one list item for each stage of the training."""
    return "\n".join(
        f"- *{stage['name']}*: {stage['steps']:,} steps, {stage['tokens']:,} tokens, "
        f"{stage['minutes']:.0f} minutes. Loss (means of 50 steps): {_curve(stage['loss'])}."
        for stage in run["stages"]
    )


def _cells(values: Iterable[Any]) -> str:
    """Return the cells of a table row."""
    return " | ".join(map(str, values))


def _sample_text(samples: list[dict[str, str]]) -> str:
    """Return the samples as indented blocks; angle brackets and stars stay as generated."""
    blocks = []
    for sample in samples:
        for kind, label in (("greedy", "greedy"), ("drawn", "temperature 0.7, seed 0")):
            lines = sample[kind].splitlines()
            body = "\n".join(f"    {line}".rstrip() for line in lines)
            blocks.append(f"“{sample['prompt']}”, {label}:\n\n{body}")
    return "\n\n".join(blocks)


def _readme(card: dict[str, Any]) -> str:
    """Return the README of a finished card."""
    run, measured = card["run"], card["figures"]
    results = {label: measured["held_out"][kind] for kind, label in ROWS.items()}
    results["training text, full-precision KV"] = measured["train"]
    full, q4 = (measured["held_out_by_position"][kind] for kind in ("full", "q4_g64"))
    context = measured["held_out_by_context"]
    readings = measured["second_reading"]
    tokens = sum(stage["tokens"] for stage in run["stages"])
    return README.format(
        seed=run["seed"],
        tokens=tokens,
        stages=_stages(run),
        note=f"\n{run['note']}\n" if run["note"] else "",
        parameters=card["parameters"],
        layers=CONFIG["num_hidden_layers"],
        hidden=CONFIG["hidden_size"],
        heads=CONFIG["num_attention_heads"],
        kv_heads=CONFIG["num_key_value_heads"],
        head_dim=CONFIG["head_dim"],
        positions=CONFIG["max_position_embeddings"],
        vocabulary=CONFIG["vocab_size"],
        bytes_per_token=card["held_out"]["bytes"] / card["held_out"]["tokens"],
        python=card["python"],
        t=card["training"],
        h=card["held_out"],
        m=measured,
        epochs=tokens / card["training"]["tokens"],
        rows="\n".join(
            f"| {label} | {row['perplexity']} | {row['bits_per_byte']} |"
            for label, row in results.items()
        ),
        spans=_cells(full),
        rule="---|" * len(full),
        full=_cells(full.values()),
        q4=_cells(q4.values()),
        tail=TAIL,
        contexts=_cells(context),
        contexts_rule="---|" * len(context),
        by_context=_cells(context.values()),
        passage=PASSAGE,
        readings="\n".join(
            f"| {label} | {_cells(readings[kind].values())} |"
            for kind, label in (("full", "full"), ("q4_g64", "Q4, groups of 64"))
        ),
        samples=_sample_text(card["samples"]),
    )


def write_card(out: Path, card: dict[str, Any]) -> None:
    """Write prose.json and the README that repeats it in words."""
    _write_json(out / "prose.json", card)
    (out / "README.md").write_text(_readme(card), encoding="utf-8")
