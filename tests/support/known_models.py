"""Probe results of a model, shared by all nodes of a process to halve their start.

The first start of each model runs all probes; later starts build the engine from the results.
"""

import threading
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from unittest import mock

from fabric.kvcache.cache_spec import ModelCacheSpec
from fabric.memory_plan import MemoryPlan
from fabric.settings import KvBits
from node.mlx import loaded_model
from node.mlx.engine import Batching, Engine
from node.mlx.loaded_model import LoadedModel, load_model, model_folder
from node.mlx.model_limits import ModelLimits
from node.mlx.probe.probe import fit_engine


@dataclass(frozen=True, slots=True)
class Fit:
    """Results of the probes."""

    spec: ModelCacheSpec
    packed: bool
    batching: Batching
    padded_waste_max: float
    pair_bytes: int


_fits: dict[tuple[bytes, KvBits], Fit] = {}
_loading = threading.Lock()


def load_known(
    model: str,
    context_tokens_max: int = 0,
    bits: KvBits | None = None,
    memory: MemoryPlan | None = None,
) -> LoadedModel:
    """Load a model as `load_model` does; raise its errors."""
    key = (_digest(model), bits or KvBits())

    def fit(loaded: Any, bits: KvBits, limits: ModelLimits) -> Engine:
        if key not in _fits:
            engine = fit_engine(loaded, bits, limits)
            _fits[key] = Fit(
                engine.spec,
                engine.packed,
                engine.batching,
                engine.padded_waste_max,
                engine.pair_bytes,
            )
            return engine
        fitted = _fits[key]
        engine = Engine(loaded, fitted.spec, packed=fitted.packed, limits=limits)
        engine.batching, engine.padded_waste_max = fitted.batching, fitted.padded_waste_max
        engine.pair_bytes = fitted.pair_bytes
        return engine

    with _loading, mock.patch.object(loaded_model, "fit_engine", fit):
        return load_model(model, context_tokens_max, bits, memory)


def _digest(model: str) -> bytes:
    digest = sha256()
    for path in sorted(model_folder(model).iterdir()):
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            digest.update(path.read_bytes())
    return digest.digest()
