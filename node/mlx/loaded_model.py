"""Loaded model: read from its folder, with the layout and fingerprint of its caches."""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load
from xxhash import xxh3_128

from fabric import __version__
from fabric.errors import FatalError
from fabric.hosting.installed_code import installed_code
from fabric.ids import Fingerprint
from fabric.kvcache.cache_spec import ModelCacheSpec
from fabric.kvcache.fingerprint import TextFile, WeightFile, model_fingerprint
from fabric.memory_plan import MemoryPlan
from fabric.settings import KvBits
from node.mlx import backend, device
from node.mlx.backend import store_weights_by_columns
from node.mlx.engine import Engine
from node.mlx.model_files import read_end_ids, read_sampling
from node.mlx.model_limits import context_tokens, read_limits
from node.mlx.probe.probe import fit_engine

BUNDLED = Path(__file__).resolve().parent.parent / "bundled"
# Increment it with every change of ours that gives a cache of the same tokens other bits: how
# vectors are quantized or padded, attention whose output later layers store, the meaning of a spec.
# Folders of older caches are then ignored.
NUMERICS_VERSION = 1
_READ_BYTES = 1 << 24
# Files beside the weights that determine a prompt's tokens.
_TEXT_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with everything that identifies its caches."""

    name: str
    engine: Engine
    tokenizer: TokenizerWrapper
    fingerprint: Fingerprint
    context_tokens_max: int
    problem: str | None  # why this model's caches are not reused
    memory: MemoryPlan | None = None  # with room for prefixes of this model
    # Its own defaults of requests.
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids that may be fed; the tokenizer may have more or fewer."""
        return self.engine.limits.vocabulary_size

    @property
    def spec(self) -> ModelCacheSpec:
        return self.engine.spec


def model_folder(model: str) -> Path:
    """Return a bundled model by name or a folder by path; raise FatalError if neither."""
    for folder in (BUNDLED / model, Path(model).expanduser()):
        if (folder / "config.json").is_file():
            return folder
    bundled = sorted(path.parent.name for path in BUNDLED.glob("*/config.json"))
    message = f"no model {model!r}: give a folder with config.json or one of {bundled}"
    raise FatalError(message, code="model_not_found")


def weights_bytes(model: str) -> int:
    """Return the bytes of a model's weights, in memory as on disk.

    Raise FatalError if there is no such model.
    """
    return sum(path.stat().st_size for path in model_folder(model).glob("*.safetensors"))


def load_model(
    model: str,
    context_tokens_max: int = 0,
    bits: KvBits | None = None,
    memory: MemoryPlan | None = None,
) -> LoadedModel:
    """Load weights and tokenizer; call it on the engine thread."""
    folder = model_folder(model)
    if memory is not None:
        device.limit_memory(memory.share_bytes, memory.pool_bytes)
    loaded, tokenizer, config = _load(folder)
    engine, problem = _fit(loaded, bits or KvBits())
    if memory is not None:
        engine.array_bytes_min = memory.array_bytes_min
    # Rows that pad the vocabulary have no text and are never sampled.
    count = min(engine.limits.vocabulary_size, max(tokenizer.get_vocab().values()) + 1)
    engine.limits = replace(engine.limits, vocabulary_size=count)
    context = context_tokens(config, getattr(loaded, "args", None))
    context = min(context, engine.limits.positions_max, context_tokens_max or context)
    if memory is not None and not engine.is_opaque:
        cache_bytes = engine.spec.bytes_per_token
        memory = memory.with_prefix(engine.prefix_bytes, cache_bytes, context)
    if memory is not None:
        engine.prefill_bytes_max = memory.prefill_bytes
    tokenizer.eos_token_ids |= read_end_ids(folder, count)
    identity = fingerprint(folder, engine.spec)
    defaults = read_sampling(folder)
    return LoadedModel(folder.name, engine, tokenizer, identity, context, problem, memory, defaults)


def _load(folder: Path) -> tuple[Any, TokenizerWrapper, dict[str, Any]]:
    """Load with mlx-lm; raise FatalError if that fails."""
    try:
        loaded, tokenizer, config = load(str(folder), return_config=True)
    except (Exception, SystemExit) as error:  # a model's module may call sys.exit: olmo's does
        message = f"mlx-lm cannot load {folder.name} ({type(error).__name__}: {error})"
        raise FatalError(message, code="unsupported_model") from error
    store_weights_by_columns(loaded)
    return loaded, tokenizer, config


def _fit(model: Any, bits: KvBits) -> tuple[Engine, str | None]:
    """Return an engine on our caches, or on mlx-lm's own with the reason."""
    limits = read_limits(model)
    try:
        return fit_engine(model, bits, limits), None
    except FatalError as error:
        return Engine(model, None, limits=limits), error.message


def fingerprint(folder: Path, spec: ModelCacheSpec) -> Fingerprint:
    """Return a digest of everything that determines a cache's bits: files, layout, numerics."""
    weights = (
        WeightFile(path.name, path.stat().st_size, _file_digest(path))
        for path in sorted(folder.glob("*.safetensors"))
    )
    paths = (folder / name for name in _TEXT_FILES)
    texts = (TextFile(path.name, _file_digest(path)) for path in paths if path.is_file())
    return model_fingerprint(weights, texts, spec, numerics_tag())


@cache
def build_versions() -> dict[str, str]:
    """Return the versions of this node's code, for operators."""
    versions = {"macfabric": __version__, "code": installed_code("node")}
    versions |= {"python": platform.python_version(), "ray": version("ray")}
    return {**versions, "mlx": mx.__version__, "mlx_lm": mlx_lm.__version__}


def numerics_tag() -> str:
    """Return a tag of the code versions and backend, on which a cache's exact bits depend."""
    versions = {"mlx": mx.__version__, "mlx_lm": mlx_lm.__version__, "ours": NUMERICS_VERSION}
    return json.dumps({**versions, "backend": backend.current().name})


def _file_digest(path: Path) -> bytes:
    digest = xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.digest()
