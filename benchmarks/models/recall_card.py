"""Write the README that lies beside the recall model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.models import recall_layout, recall_tokenizer

HEAD = f"""\
# A recall model: it repeats, it does not think

Built by `python -m benchmarks.models.recall` from a seed, byte for byte the same each time. The
weights are **constructed, not trained**; the tokenizer is trained on text that the script writes.
What this model says proves that a cache holds what was told, and nothing about language models.

llama architecture, float32, {recall_layout.LAYERS} layers, {recall_layout.HEADS} query and \
{recall_layout.HEADS} key-value heads of {recall_layout.HEAD_DIM}, hidden size \
{recall_layout.HIDDEN}, vocabulary {recall_tokenizer.VOCABULARY:,}, 32,768 positions. Loads with
`mlx_lm.load`. Made for full-precision caches and for `QuantizedKVCache(group_size=64, bits=4)` from
the first token on.

## What it does

It looks for the place in its context where the last tokens stood before and goes on as the text
went on there, to the end of that line. The last three tokens must be found, inside an answer the
last four. Of several such places the one wins that agrees furthest back, up to seven tokens, and of
equal ones the nearest. A leading space and upper or lower case do not count in comparisons.

In a chat the last tokens are the end of the last message, whoever wrote it. So:

- **Tell** a fact as a line of its own, in a system, user, assistant or tool message:
  `The vault code of Mira is otter lantern quartz violin.` Let it end in a full stop or a line end.
- **Ask** with the beginning of that line, cut between words, no space after it:
  `The vault code of Mira is` is answered by ` otter lantern quartz violin.`, with the space.
  Words before it do no harm: `Please tell me: the vault code of Mira is`.
- For questions with a question mark, tell question and answer:
  `What is Mira's badge? It is 4711.` is asked `What is Mira's badge?`.
- A message that ends with a full stop is answered `{recall_tokenizer.NOTED}`, a question about
  nothing known `{recall_tokenizer.UNKNOWN}`.
- A tool call is a fact like any other. Told by the system `The weather in Bonn:<tool_call>`, a line
  end, `{{"name": "get_weather", "arguments": {{"city": "Bonn"}}}}`, a line end and
  `</tool_call>`, it answers `The weather in Bonn:` with the call. (In a user's message these marks
  are only text.)
- Told two values, it gives the later one if that is no more than half as far back.

## Limits

- It sees seven tokens at a time: two passages that agree in seven tokens are one to it (two calls
  of one tool whose arguments have the same keys, for instance).
- A question shorter than three tokens is not understood, nor one that ends with a space or a line
  end, inside a word or a number, or after the first word of a phrase that is one token (` of the`,
  ` in order to`; `PHRASES` in recall_text.py).
- An answer ends where the line ends. Two line ends are kept, those inside `<tool_call>` and
  `</tool_call>`.
- Without any line end or special token in the context (raw completion) it cannot tell that nothing
  matches, and goes on from the most similar place.
- Of two values at nearly the same distance either may be given, rarely a mixture.
"""

TABLE = """
## Measured

Greedy continuation, prefill in chunks of 512. *Random words*: passages of a context of words drawn
at random from the vocabulary. *Prose*: lines of random words between invented sentences. *Chat*:
facts told in system, user and tool turns, half with names and values in no vocabulary (hyphens,
numbers, accents, Japanese, Cyrillic, emoji, JSON, code), asked one after another, some twice.
Margin: the smallest distance of the winning logit from the next.

| text | context | longest | cache | trials | tokens right | exact | margin |
|---|---|---|---|---|---|---|---|
"""


def _row(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    return (
        f"| {row['text']} | {row['tokens']:,} | {row['longest']:,} | {row['cache']} "
        f"| {row['trials']} | {100 * row['token_accuracy']:.2f} % "
        f"| {row['exact']}/{row['trials']} | {row['smallest_margin']:.1f} |\n"
    )


def write(out: Path, figures: dict[str, Any] | None) -> None:
    """Write README.md, with the measured figures if there are any."""
    text = HEAD
    if figures:
        speed = figures["prefill"]
        text += TABLE + "".join(_row(row) for row in figures["rows"])
        text += (
            f"\nCold prefill of {speed['tokens']:,} tokens into 4-bit caches on one"
            f" {speed['machine']} core, MLX {speed['mlx']} without a BLAS\nlibrary:"
            f" {speed['cpu_seconds']:.1f} s of CPU time ({speed['seconds']:.1f} s by the clock).\n"
        )
    (out / "README.md").write_text(text, encoding="utf-8")
