"""The backend that models compute on, and the one module that reads it from MLX."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

from node.mlx import backend

ROOT = Path(__file__).resolve().parents[3]
ASKS = re.compile(r"mx\.(metal|cuda)\b|default_device\(\)|is_available\(\)")


@pytest.mark.parametrize(
    ("device", "has_metal", "expected"),
    [
        (mx.cpu, False, backend.CPU),
        (mx.cpu, True, backend.CPU),  # a Mac set to compute on its CPU
        (mx.gpu, True, backend.METAL),
        (mx.gpu, False, backend.CUDA),
    ],
)
def test_backend_follows_from_device_and_metal(monkeypatch, device, has_metal, expected):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    monkeypatch.setattr(mx.metal, "is_available", lambda: has_metal)

    assert backend.current() is expected


def test_backend_names_in_fingerprints_are_distinct():
    names = {each.name for each in (backend.CPU, backend.METAL, backend.CUDA)}

    assert len(names) == 3


def test_only_backend_module_queries_mlx_for_the_device():
    asking = {path.name for path in (ROOT / "node").rglob("*.py") if ASKS.search(path.read_text())}

    assert asking == {"backend.py"}
