"""A model's fingerprint covers everything that decides its bits."""

from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from fabric.settings import KvBits
from node.mlx import backend, loaded_model
from node.mlx.loaded_model import fingerprint
from node.mlx.probe.probe import fit_engine
from tests.support.tiny_models import LLAMA, build_model, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", LLAMA)


SPEC = fit_engine(build_model(LLAMA), KvBits()).spec


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (mx, "__version__", "0.0.1"),
        (mlx_lm, "__version__", "0.0.1"),  # its model code computes what is cached
        (loaded_model, "NUMERICS_VERSION", 1_000_000),
        (backend, "current", lambda: backend.METAL),
    ],
)
def test_fingerprint_depends_on_code_versions(
    owner: object, name: str, value: object, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files under other code get another folder."""
    before = fingerprint(folder, SPEC)
    assert fingerprint(folder, SPEC) == before
    monkeypatch.setattr(owner, name, value)

    assert fingerprint(folder, SPEC) != before


def test_fingerprint_depends_on_model_files(folder: Path) -> None:
    """Weights, tokenizer and config each count."""
    before = fingerprint(folder, SPEC)
    seen = {before}
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        raw = bytearray((folder / name).read_bytes())
        raw[-1] ^= 1
        (folder / name).write_bytes(raw)
        seen.add(fingerprint(folder, SPEC))
    assert len(seen) == 4
