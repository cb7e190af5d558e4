"""An engine thread over a tiny model, and helpers to feed it."""

import queue
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

from fabric.hosting.clock import SystemClock
from fabric.turn.generation import Priority, Sampling
from node.engine.engine_thread import EngineThread
from node.engine.sequence import Broke, Ended, Produced, Sequence, SequenceEvent, SequenceInput
from node.mlx.answer import Answer
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.engine import Engine
from node.mlx.loaded_model import LoadedModel, load_model
from node.mlx.resident_cache import ResidentCache
from tests.support.tiny_models import TOKENS

Events = queue.Queue[SequenceEvent]
GREEDY = Sampling(max_tokens=12, ignore_eos=True)


class Bench:
    """An engine thread with a loaded model."""

    def __init__(self, folder: Path, *, exact_chunks: bool = False, active_max: int = 8) -> None:
        self.thread = EngineThread(
            SystemClock(), active_max=active_max, waiting_max=32, exact_chunks=exact_chunks
        )

        def build() -> tuple[Engine, LoadedModel]:
            loaded = load_model(str(folder))
            return loaded.engine, loaded

        self.loaded = self.thread.start(build)
        self.tokenizer = ChatTokenizer(self.loaded.tokenizer)

    def cache(self, capacity_tokens: int = 512) -> ResidentCache:
        """Return an empty cache."""
        return self.thread.call(lambda: self.thread.engine.new_cache(capacity_tokens)).result()

    def make(
        self,
        prompt: list[int],
        sampling: Sampling,
        cache: ResidentCache | None = None,
        *,
        priority: Priority = Priority.INTERACTIVE,
        **hooks: Any,
    ) -> tuple[Sequence, Events]:
        """Return a sequence that is not queued yet, with its events."""
        events: Events = queue.Queue()
        names = {field.name for field in fields(SequenceInput)} & hooks.keys()
        inputs = {name: hooks.pop(name) for name in names}
        request = SequenceInput(
            prompt,
            sampling,
            sampling.seed or 0,
            self.tokenizer.eos_ids,
            self.tokenizer.token_text,
            priority=priority,
            **inputs,
        )
        sequence = Sequence(
            request,
            cache=cache or self.cache(),
            answer=Answer(self.tokenizer, "", sampling.stop, None),
            emit=events.put,
            **hooks,
        )
        return sequence, events

    def submit(self, prompt: list[int], sampling: Sampling, *more: Any) -> tuple[Sequence, Events]:
        """Queue a sequence and return it with its events."""
        sequence, events = self.make(prompt, sampling, *more)
        self.thread.submit(sequence)
        return sequence, events

    def answer(self, prompt: list[int], sampling: Sampling) -> list[int]:
        """Return the answer of a sequence that runs alone."""
        return drain_events(self.submit(prompt, sampling)[1]).answer_ids

    def bytes_of(self, cache: ResidentCache) -> bytes:
        """Return a cache's exact contents."""

        def gather() -> bytes:
            cache.settle()
            return bytes(cache.gather(0, cache.tokens_count))

        return self.thread.call(gather).result()


def at_token(sequence: Sequence, index: int, act: Any) -> None:
    """Call `act` on the engine thread when token number `index` is produced."""
    emit = sequence.emit

    def watch(event: SequenceEvent) -> None:
        emit(event)
        if isinstance(event, Produced) and event.index == index:
            act()

    sequence.emit = watch


def wait(events: Events) -> Ended | Broke:
    """Drain events up to the last one."""
    while True:
        event = events.get(timeout=60)
        if isinstance(event, (Ended, Broke)):
            return event


def drain_events(events: Events) -> Ended:
    """Drain the events of a sequence that must end without an error."""
    event = wait(events)
    assert isinstance(event, Ended)
    return event


def prompt_of(count: int, seed: int) -> list[int]:
    """Return random ordinary tokens."""
    rng = random.Random(seed)
    return [rng.randrange(10, TOKENS) for _ in range(count)]
