"""Load a model folder and read from it what a cache of it looks like."""

import json
import sys
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load
from xxhash import xxh3_128

from fabric.cache_spec import ModelCacheSpec
from fabric.errors import FatalError
from fabric.ids import Fingerprint
from fabric.settings import KvBits
from node.mlx.engine import Engine
from node.mlx.probe import fit_engine

BUNDLED = Path(__file__).resolve().parent.parent / "bundled"
_CONTEXT_TOKENS_DEFAULT = 8_192
_READ_BYTES = 1 << 24
# Files beside the weights that change what a prompt turns into.
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
    problem: str | None  # why nothing of this model's caches is reused
    vocabulary_size: int  # token ids that the model takes; tokenizers may know fewer

    @property
    def spec(self) -> ModelCacheSpec:
        """What the model keeps per token."""
        return self.engine.spec


def model_folder(model: str) -> Path:
    """Find a bundled model by name or a folder by path; raise FatalError if neither."""
    for folder in (BUNDLED / model, Path(model).expanduser()):
        if (folder / "config.json").is_file():
            return folder
    bundled = sorted(path.parent.name for path in BUNDLED.glob("*/config.json"))
    message = f"no model {model!r}: give a folder with config.json or one of {bundled}"
    raise FatalError(message, code="model_not_found")


def load_model(model: str, context_tokens_max: int = 0, bits: KvBits | None = None) -> LoadedModel:
    """Load weights and tokenizer; call it on the thread that will run the model."""
    folder = model_folder(model)
    loaded, tokenizer, config = load(str(folder), return_config=True)
    engine, problem = _fit(loaded, bits or KvBits())
    text_config = config.get("text_config", config)
    context = int(text_config.get("max_position_embeddings", _CONTEXT_TOKENS_DEFAULT))
    if context_tokens_max:
        context = min(context, context_tokens_max)
    print_of = fingerprint(folder, engine.spec)
    vocabulary_size = int(text_config.get("vocab_size") or len(tokenizer))
    return LoadedModel(folder.name, engine, tokenizer, print_of, context, problem, vocabulary_size)


def _fit(model: Any, bits: KvBits) -> tuple[Engine, str | None]:
    """Return an engine on our caches, or on mlx-lm's own and why."""
    try:
        return fit_engine(model, bits), None
    except FatalError as error:
        return Engine(model, None), error.message


def fingerprint(folder: Path, spec: ModelCacheSpec) -> Fingerprint:
    """Digest everything that changes a cache's contents: files, layout, numerics."""
    digest = blake2b(digest_size=32, person=b"mf-fingerprint")
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        digest.update(_file_digest(path))
    for name in _TEXT_FILES:
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + b":" + _file_digest(path))
    digest.update(repr(spec).encode())
    digest.update(numerics_tag().encode())
    return Fingerprint(digest.digest())


def numerics_tag() -> str:
    """Name what decides rounding: another backend or version gives other bits."""
    backend = "metal" if mx.metal.is_available() else f"cpu-{sys.platform}"
    return json.dumps({"mlx": mx.__version__, "backend": backend})


def _file_digest(path: Path) -> bytes:
    digest = xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.digest()
