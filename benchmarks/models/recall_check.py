"""Measure how exactly the recall model repeats its context."""

from __future__ import annotations

import itertools
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
import numpy as np

from benchmarks.models import recall_facts, recall_tokenizer
from benchmarks.models.recall_ask import FULL, Q4, Answer, Memory
from benchmarks.models.recall_facts import Fact

# Contexts per length, and trials in each.
TRIALS = {256: (4, 8), 1024: (4, 8), 4096: (3, 8), 8192: (2, 12), 16384: (1, 12)}
FACTS = 6
RAW_AT_MOST = 8192  # attention takes minutes beyond; the longest is for chat alone
PASSAGE, CUE = 20, 3
SPEED_TOKENS = 2000


class Trial(NamedTuple):
    """What should have been generated and what was."""

    expected: list[int]
    answer: Answer

    @property
    def right(self) -> int:
        """Return how many tokens were right."""
        return sum(a == b for a, b in zip(self.expected, self.answer.ids, strict=False))


def random_words(memory: Memory, size: int, draw: random.Random) -> Iterator[Trial]:
    """Continue passages of a context of words drawn at random from the vocabulary."""
    vocabulary = memory.tokenizer.get_vocab()
    special = {vocabulary[text] for text in (*recall_tokenizer.ADDED, "Ċ")}
    words = sorted(set(vocabulary.values()) - special)
    ids = draw.choices(words, k=size - PASSAGE)
    memory.feed(ids)
    for _ in range(TRIALS[size][1]):
        start = draw.randrange(len(ids) - PASSAGE)
        passage = ids[start : start + PASSAGE]
        yield Trial(passage[CUE:], memory.answer(passage[:CUE], PASSAGE - CUE))
        memory.trim(len(ids))


def prose(memory: Memory, size: int, draw: random.Random) -> Iterator[Trial]:
    """Continue lines of random words that stand between invented sentences."""
    encode = memory.tokenizer.encode
    passages = [recall_facts.passage(draw) for _ in range(TRIALS[size][1])]
    lines = recall_facts.prose(draw, 8 * size).splitlines()
    while len(encode("\n".join([*lines, *passages]))) > size - PASSAGE:
        lines.pop()
    for passage in passages:
        lines.insert(draw.randint(0, len(lines)), passage)
    ids = encode("\n".join([*lines, ""]))
    memory.feed(ids)
    for passage in passages:
        tokens = encode(passage)
        # The end of the line ends the answer.
        expected = [*tokens[CUE:], memory.tokenizer.eos_token_id]
        yield Trial(expected, memory.answer(tokens[:CUE], len(expected)))
        memory.trim(len(ids))


def _conversation(memory: Memory, size: int, draw: random.Random) -> tuple[list[Any], list[Fact]]:
    """Return messages of about ``size`` tokens that tell facts in turns of every role."""
    facts = recall_facts.facts(draw, FACTS)
    lines = [fact.line for fact in facts]
    characters = 2 * size
    while True:
        filler = [recall_facts.prose(draw, characters) if characters > 0 else "" for _ in range(3)]
        messages = [
            {"role": "system", "content": f"{filler[0]}{lines[0]}\n{lines[1]}\nBe exact."},
            {"role": "user", "content": f"{filler[1]}{lines[2]}\nRemember this."},
            {"role": "assistant", "content": recall_tokenizer.NOTED},
            {"role": "user", "content": f"Look it up:\n{lines[3]}"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "look_up", "arguments": {"key": "all"}}}],
            },
            {"role": "tool", "content": f"{lines[4]}\n{filler[2]}{lines[5]}"},
            {"role": "assistant", "content": "Done."},
        ]
        text = memory.tokenizer.apply_chat_template(messages, tokenize=False)
        if len(memory.tokenizer.encode(text)) <= size - 40 * TRIALS[size][1] or characters < 0:
            return messages, facts
        characters = characters * 19 // 20 - 1


def chat(memory: Memory, size: int, draw: random.Random) -> Iterator[Trial]:
    """Ask for every fact in a conversation that goes on, then for some of them again."""
    messages, facts = _conversation(memory, size, draw)
    again = draw.choices(facts, k=TRIALS[size][1] - FACTS)
    for fact in draw.sample(facts, FACTS) + again:
        messages.append({"role": "user", "content": fact.question})
        answer = memory.chat(messages)
        # The client sends back the words it was given.
        messages.append({"role": "assistant", "content": memory.text(answer)})
        expected = memory.tokenizer.encode(fact.answer, add_special_tokens=False)
        yield Trial([*expected, memory.tokenizer.eos_token_id], answer)


KINDS = {"random words": random_words, "prose": prose, "chat": chat}


def _row(folder: Path, loaded: tuple[Any, Any], kind: str, size: int, cache: str) -> dict[str, Any]:
    """Measure one kind of text at one length with one cache."""
    # The same texts for both caches.
    draw = random.Random(f"{kind} {size}")
    trials: list[Trial] = []
    longest = 0
    for _ in range(TRIALS[size][0]):
        memory = Memory(folder, cache, loaded)
        for trial in KINDS[kind](memory, size, draw):
            trials.append(trial)
            longest = max(longest, len(memory.ids))
    expected = sum(len(trial.expected) for trial in trials)
    return {
        "text": kind,
        "tokens": size,
        "cache": cache,
        "trials": len(trials),
        "longest": longest,
        "token_accuracy": round(sum(trial.right for trial in trials) / expected, 5),
        "exact": sum(trial.expected == trial.answer.ids for trial in trials),
        "smallest_margin": round(min(trial.answer.margin for trial in trials), 2),
    }


def table(folder: Path, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Yield one row per kind of text, length and cache."""
    loaded = mlx_lm.load(str(folder))[:2]
    for size, kind, cache in itertools.product(sizes, KINDS, (FULL, Q4)):
        if size <= RAW_AT_MOST or kind == "chat":
            yield _row(folder, loaded, kind, size, cache)


def speed(folder: Path) -> dict[str, float]:
    """Time a cold prefill in this process."""
    memory = Memory(folder, Q4)
    ids = np.random.default_rng(0).integers(300, 1500, SPEED_TOKENS).tolist()
    memory.feed(ids[:64])
    memory.trim(0)
    wall, cpu = time.perf_counter(), time.process_time()
    memory.feed(ids)
    return {
        "tokens": SPEED_TOKENS,
        "seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
    }


def plain_speed(folder: Path) -> dict[str, Any]:
    """Time a cold prefill in a process without preloaded libraries, as users have it."""
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    environment["OMP_NUM_THREADS"] = "1"
    code = (
        "import json, sys; from pathlib import Path; from benchmarks.models import recall_check;"
        "print(json.dumps(recall_check.speed(Path(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return {**json.loads(done.stdout), "mlx": mx.__version__, "machine": platform.machine()}
