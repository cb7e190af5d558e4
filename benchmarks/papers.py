"""The papers' tables beside ours: `papers.md` in a folder of results.

Published figures are the papers', each with its table. Ours come from the results of the folder; a
figure without a result shows the command that measures it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

SEMANTIC: Final = '"Agent Memory Below the Prompt" (arXiv 2603.04428), M4 Pro with 24 GB'
LEYLINE: Final = '"Leyline: KV Cache Directives for Agentic Inference", one H100'

Results = Mapping[str, Mapping[str, Any]]  # records by the benchmark's name


class MissingResultError(LookupError):
    """The folder lacks a result."""


@dataclass(frozen=True, slots=True)
class Row:
    """Figure of a paper, and the function that returns ours."""

    figure: str
    published: str
    ours: Callable[[Results], str]
    comparable: str  # the limits of the comparison


@dataclass(frozen=True, slots=True)
class Table:
    """Table of a paper."""

    title: str
    source: str
    benchmark: str  # the benchmark whose result it needs
    rows: Sequence[Row]


def page(results: Results) -> str:
    """Return the page for the results of a folder."""
    lines = ["# The papers' tables, and ours", ""]
    for source in (SEMANTIC, LEYLINE):
        lines += [f"- {source}"]
    for table in TABLES:
        lines += ["", f"## {table.title}", "", f"{table.source}. Ours: `bench {table.benchmark}`."]
        lines += ["", "| figure | published | ours | comparable |", "|---|---|---|---|"]
        for row in table.rows:
            try:
                ours = row.ours(results)
            except (MissingResultError, KeyError):
                ours = "not measured yet"
            lines.append(f"| {row.figure} | {row.published} | {ours} | {row.comparable} |")
    return "\n".join(lines) + "\n"


def _figure(results: Results, name: str, *keys: str) -> float:
    """Return a figure of a result; raise MissingResultError if it is not there."""
    if name not in results:
        raise MissingResultError(name)
    value: Any = results[name]
    for key in keys:
        value = value[key]
    return float(value)


def _ttft(state: str, context: int) -> Callable[[Results], str]:
    def ours(results: Results) -> str:
        keys = ("figures", "seconds to the first token, 1 at once", f"{context}")
        cold, warm = (_figure(results, "ttft", *keys, each) for each in ("cold", state))
        return f"{cold:.3g} s / {warm:.3g} s = {cold / warm:.0f}x"

    return ours


def _of(name: str, *keys: str, form: str = "{:.3g}") -> Callable[[Results], str]:
    def ours(results: Results) -> str:
        return form.format(_figure(results, name, *keys))

    return ours


def _peer_row(key: str) -> Callable[[Results], str]:
    def ours(results: Results) -> str:
        keys = ("figures", "seconds to the first token")
        shown = []
        for name in ("macfabric", "mlx_lm.server", "vllm-mlx"):
            try:
                shown.append(f"{name} {_figure(results, 'peers', *keys, name, key):.3g} s")
            except KeyError:
                shown.append(f"{name} did not run")
        return ", ".join(shown)

    return ours


def _ablation(component: str) -> Callable[[Results], str]:
    return _of("ablation", "figures", "component", component, "gain", form="{:.3g}x")


def _staggered(pair: str) -> Callable[[Results], str]:
    def ours(results: Results) -> str:
        keys = ("figures", "seconds", pair)
        line, together = (
            _figure(results, "staggered", *keys, each)
            for each in ("second in line", "second together")
        )
        return f"{line:.3g} s / {together:.3g} s = {line / together:.2f}x"

    return ours


def _perplexity(results: Results) -> str:
    keys = ("figures", "cache", "4-bit g64, the node's cache")
    middle, low, high = (
        _figure(results, "perplexity", *keys, f"{each}_percent")
        for each in ("added", "low", "high")
    )
    return f"{middle:+.2f} % ({low:+.2f} to {high:+.2f})"


def _edit_hits(results: Results) -> str:
    keys = ("figures", "arms")
    shares = [
        _figure(results, "edit", *keys, f"1 {arm}", "cached_share")
        for arm in ("none", "prefix", "splice")
    ]
    return " / ".join(f"{100 * share:.1f} %" for share in shares)


_RATIO = "the ratio; seconds are another machine's and model's"
_TTFT_ROWS = tuple(
    Row(f"{context:,} tokens: cold / {state}", published, _ttft(ours, context), _RATIO)
    for context, state, ours, published in (
        (1_024, "warm", "disk", "Gemma 3 8.3x, DeepSeek 4.5x, Llama 9.6x"),
        (4_096, "warm", "disk", "Gemma 3 27x, DeepSeek 15x, Llama 35x"),
        (8_192, "warm", "disk", "Gemma 3 56x, DeepSeek 25x, Llama 65x"),
        (16_384, "warm", "disk", "Gemma 3 93x, DeepSeek 45x, Llama 111x"),
        (32_768, "warm", "disk", "Gemma 3 94x, DeepSeek 75x"),
        (4_096, "hot", "hot", "Gemma 3 22x, DeepSeek 11x, Llama 24x"),
        (16_384, "hot", "hot", "Gemma 3 79x, DeepSeek 40x, Llama 91x"),
        (32_768, "hot", "hot", "Gemma 3 136x, DeepSeek 76x"),
    )
)
_MEMORY = ("figures", "agents")
TABLES: Final = (
    Table("Time to the first token by state", "Semantic, tables 3 and 13", "ttft", _TTFT_ROWS),
    Table(
        "Beside vllm-mlx",
        "Semantic, table 5, Llama 3.1 8B at 4k tokens",
        "peers",
        (
            Row("cold", "10.2 s, vllm-mlx 4.39 s", _peer_row("cold"), "the order, not the seconds"),
            Row("warm", "0.29 s, vllm-mlx 0.29 s", _peer_row("hot"), "the order, not the seconds"),
            Row("restart", "0.29 s, vllm-mlx 8.08 s", _peer_row("restart"), "the order"),
        ),
    ),
    Table(
        "Components",
        "Semantic, table 6",
        "ablation",
        (
            Row("persistence: first token at 4k", "27x", _ablation("persistence"), _RATIO),
            Row(
                "4-bit caches: agents or bytes",
                "4.0x agents at 8k",
                _ablation("4-bit caches"),
                "bytes per token; the model's own precision is 32 bits without a GPU, else 16",
            ),
            Row(
                "batching: tokens/s",
                "2.0x, two agents",
                _ablation("ragged batch"),
                "four agents of unequal length; published is a definition, ours is measured",
            ),
        ),
    ),
    Table(
        "Agents in 10.2 GB",
        "Semantic, tables 2 and 14, fp16 / 4 bits",
        "memory",
        tuple(
            Row(
                f"{model} at {context}",
                published,
                _of("memory", *_MEMORY, f"{model} at {context}", "here", form="{:.0f}"),
                "directly: the same geometry and budget; ours in GiB, with windows as windows",
            )
            for model, context, published in (
                ("Gemma 3 12B", "4,096", "6 / 24"),
                ("Gemma 3 12B", "8,192", "3 / 12"),
                ("Gemma 3 12B", "32,768", "0 / 3"),
                ("Llama 3.1 8B", "4,096", "19 / 70"),
                ("Llama 3.1 8B", "8,192", "9 / 35"),
                ("Llama 3.1 8B", "16,384", "4 / 17"),
            )
        ),
    ),
    Table(
        "Staggered arrivals, 4k tokens, 2 s apart",
        "Semantic, appendix F; the second's wait from its arrival",
        "staggered",
        (
            Row("cold, cold", "Gemma 3: 36.5 s in line / 36.1 s together = 1.01x",
                _staggered("cold, then cold"), _RATIO),
            Row("cold, hot", "not measured", _staggered("cold, then hot"), "ours alone"),
            Row("cold, disk", "not measured", _staggered("cold, then disk"), "ours alone"),
        ),
    ),
    Table(
        "Perplexity of 4-bit caches",
        "Semantic, table 9",
        "perplexity",
        (
            Row("increase", "Gemma 3 -0.7 %, DeepSeek +3.0 %, Llama +2.8 %",
                _perplexity, "another model and text"),
        ),
    ),
    Table(
        "Edited conversations",
        "Leyline, table 3: replayed prompts of 17k tokens, hit rates",
        "edit",
        (
            Row("no cache / prefix / edited cache kept", "0 % / 49.6 % / 60.8 %",
                _edit_hits, "the gain in points; another conversation"),
        ),
    ),
)  # fmt: skip
