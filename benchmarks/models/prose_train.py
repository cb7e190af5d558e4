"""Train the prose model in stages on one CPU thread, resumable at any checkpoint."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama
from safetensors import safe_open

SEED = 20260
WEIGHT_DECAY = 0.1
CLIP = 1.0
FLOOR = 0.02


@dataclass(frozen=True)
class Stage:
    """Describe one warm-up, peak and decay of the learning rate."""

    name: str
    steps: int
    minutes: float
    peak_rate: float
    warm_up: int
    phases: tuple[tuple[float, int, int], ...]
    """(share of the stage at which the phase ends, rows, window)."""
    copies: float
    """Share of the rows in which a passage comes a second time."""


# Short windows teach words cheaply, long ones the use of a thousand tokens. After the first stage
# more than 128 tokens of context helped hardly at all; text in which a passage returns teaches the
# model to look back, which is what makes damage to a KV cache visible.
STAGES = (
    Stage("plain", 3264, 40.0, 6e-3, 100, ((0.54, 8, 128), (0.92, 4, 512), (1.0, 2, 1024)), 0.0),
    Stage("copies", 740, 12.0, 3e-3, 30, ((0.78, 4, 512), (1.0, 2, 1024)), 0.5),
)


@dataclass
class Progress:
    """Count what a stage has done, across resumptions."""

    stage: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[list[float]] = field(default_factory=list)

    def share(self, stage: Stage) -> float:
        """Return how much of the stage is over, by steps or by time, whichever is further."""
        by_time = self.seconds / (60 * stage.minutes)
        return min(1.0, max(self.step / stage.steps, by_time))


def learning_rate(stage: Stage, progress: Progress) -> float:
    """Return the rate after linear warm-up and cosine decay."""
    warm = min(1.0, (progress.step + 1) / stage.warm_up)
    cosine = 0.5 * (1 + math.cos(math.pi * progress.share(stage)))
    return stage.peak_rate * warm * (FLOOR + (1 - FLOOR) * cosine)


def batch(stream: np.ndarray, stage: Stage, progress: Progress, seed: int) -> mx.array:
    """Return the windows of one step; they depend on seed, stage and step only."""
    share = progress.share(stage)
    rows, length = next((r, n) for end, r, n in stage.phases if share < end or end == 1.0)
    draw = np.random.default_rng([seed, progress.stage, progress.step])
    # One row from each equal part of the stream: even coverage, and no state to save.
    part = (len(stream) - length - 1) / rows
    starts = ((np.arange(rows) + draw.random(rows)) * part).astype(int)
    windows = np.stack([stream[s : s + length + 1] for s in starts])
    for window in windows:
        if draw.random() < stage.copies:
            copy_passage(window, draw)
    return mx.array(windows)


def copy_passage(window: np.ndarray, draw: np.random.Generator) -> None:
    """Let a passage of random place and length come again at a random later place."""
    size = int(draw.integers(24, len(window) // 3))
    first = int(draw.integers(0, len(window) - 2 * size))
    again = int(draw.integers(first + size, len(window) - size + 1))
    window[again : again + size] = window[first : first + size]


def _loss(model: llama.Model, windows: mx.array) -> mx.array:
    """Return the mean next-token loss of some windows."""
    logits = model(windows[:, :-1])
    return nn.losses.cross_entropy(logits, windows[:, 1:], reduction="mean")


def save_state(
    path: Path, model: llama.Model, optimizer: optim.Optimizer, done: Sequence[Progress]
) -> None:
    """Write everything a resumed run needs, replacing the former state only when complete."""
    path.mkdir(parents=True, exist_ok=True)
    arrays = {f"model.{k}": v for k, v in tree_flatten(model.parameters())}
    arrays |= {f"optimizer.{k}": v for k, v in tree_flatten(optimizer.state)}
    unfinished = path / "state.partial.safetensors"
    stages = json.dumps([asdict(progress) for progress in done])
    mx.save_safetensors(str(unfinished), arrays, {"stages": stages})
    unfinished.replace(path / "state.safetensors")


def load_state(path: Path, model: llama.Model, optimizer: optim.Optimizer) -> list[Progress]:
    """Restore model and optimizer in place and return how far each stage was."""
    parts: dict[str, list[tuple[str, mx.array]]] = {"model": [], "optimizer": []}
    with safe_open(path / "state.safetensors", framework="numpy") as file:
        metadata = file.metadata()
        for name in file.keys():  # noqa: SIM118 (no mapping: it has keys() and no iteration)
            part, _, key = name.partition(".")
            parts[part].append((key, mx.array(file.get_tensor(name))))
    model.load_weights(parts["model"])
    optimizer.state = tree_unflatten(parts["optimizer"])
    return [Progress(**progress) for progress in json.loads(metadata["stages"])]


def new_optimizer(model: llama.Model) -> optim.Optimizer:
    """Return an optimizer whose state is laid out, so that a saved one can replace it."""
    optimizer = optim.AdamW(0.0, betas=[0.9, 0.95], weight_decay=WEIGHT_DECAY)
    optimizer.init(model.trainable_parameters())
    return optimizer


def train_stage(
    model: llama.Model,
    optimizer: optim.Optimizer,
    stream: np.ndarray,
    stage: Stage,
    progress: Progress,
    *,
    seed: int,
    checkpoint: Callable[[], None],
) -> None:
    """Train until the steps or the minutes are used up, with a checkpoint every three minutes."""
    loss_and_grad = nn.value_and_grad(model, _loss)
    saved = progress.seconds
    recent: list[float] = []
    while progress.share(stage) < 1.0:
        began = time.monotonic()
        optimizer.learning_rate = learning_rate(stage, progress)
        windows = batch(stream, stage, progress, seed)
        loss, gradients = loss_and_grad(model, windows)
        gradients, _ = optim.clip_grad_norm(gradients, CLIP)
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)
        recent.append(loss.item())
        progress.step += 1
        progress.tokens += windows.shape[0] * (windows.shape[1] - 1)
        progress.seconds += time.monotonic() - began
        if progress.step % 50 == 0 or progress.share(stage) == 1.0:
            mean, recent = float(np.mean(recent)), []
            progress.curve.append([progress.step, round(mean, 4)])
            _report(progress, stage, mean, windows.shape[1] - 1)
        if progress.seconds - saved > 180:
            saved = progress.seconds
            checkpoint()
    checkpoint()


def train(
    model: llama.Model,
    stream: np.ndarray,
    stages: Sequence[Stage],
    state: Path,
    *,
    seed: int,
    resume: bool,
    export: Callable[[], None],
) -> list[Progress]:
    """Train through all stages, or from where a run stopped, and return what each has done."""
    optimizer = new_optimizer(model)
    done = [Progress()]
    if resume and (state / "state.safetensors").exists():
        done = load_state(state, model, optimizer)
    while True:
        checkpoint = partial(_checkpoint, state, model, optimizer, done, export)
        stage, progress = stages[len(done) - 1], done[-1]
        train_stage(model, optimizer, stream, stage, progress, seed=seed, checkpoint=checkpoint)
        if len(done) == len(stages):
            return done
        done.append(Progress(stage=len(done)))
        optimizer = new_optimizer(model)


def _checkpoint(
    state: Path,
    model: llama.Model,
    optimizer: optim.Optimizer,
    done: Sequence[Progress],
    export: Callable[[], None],
) -> None:
    """Save what a resumed run needs, and the model as it is now."""
    save_state(state, model, optimizer, done)
    export()


def _report(progress: Progress, stage: Stage, loss: float, window: int) -> None:
    """Print one line of progress."""
    print(
        f"{stage.name} {progress.step:5d}  {100 * progress.share(stage):3.0f} %  "
        f"window {window:4d}  loss {loss:.3f}  {progress.tokens / progress.seconds:5.0f} tokens/s  "
        f"{progress.seconds / 60:4.1f} min",
        flush=True,
    )
