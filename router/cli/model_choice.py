"""Validation of a chosen model before anything is started."""

import json
from collections.abc import Iterator
from pathlib import Path

from router.cli.errors import MISUSED, CommandError, describe_os_error
from router.limits import WEIGHTS_INDEX_BYTES_MAX

BUNDLED = Path(__file__).resolve().parents[2] / "node" / "bundled"
WEIGHTS = "*.safetensors"
_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"


def bundled_models() -> list[str]:
    """List the bundled models."""
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{_CONFIG}"))


def chosen_model(model: str, option: str = "--model") -> str:
    """Return a bundled model's name, or the absolute path of a folder; raise CommandError.

    `option` is the option or setting that chose it.
    """
    bundled = bundled_models()
    if model in bundled:
        return model
    folder = Path(model).expanduser()
    if not folder.is_dir():
        message = (
            f"{option} {model}: there is no such folder, and no bundled model of that name "
            f"({', '.join(bundled)})"
        )
        raise CommandError(message, MISUSED)
    for pattern, what in ((_CONFIG, _CONFIG), (WEIGHTS, "weights (*.safetensors)")):
        if not any(folder.glob(pattern)):
            message = f"{option} {model}: the folder has no {what}, so mlx-lm cannot load it"
            raise CommandError(message, MISUSED)
    problems = list(_weight_problems(folder))
    if problems:
        message = f"{option} {model}: {'; '.join(problems)}"
        raise CommandError(message, MISUSED)
    return str(folder.resolve())


def weights_bytes(model: str) -> int | None:
    """Return the size of a model's weights; None if they are not on this machine."""
    folder = BUNDLED / model if model in bundled_models() else Path(model).expanduser()
    return sum(path.stat().st_size for path in folder.glob(WEIGHTS)) or None


def require_on_every_mac(model: str, option: str) -> None:
    """Raise CommandError unless this Mac has the model at a path that works on every Mac."""
    chosen = chosen_model(model, option)
    if chosen != model and not Path(model).expanduser().is_absolute():
        message = (
            f"{option} {model}: write an absolute path, from / or ~: every Mac has its own folder"
        )
        raise CommandError(message, MISUSED)


def _weight_problems(folder: Path) -> Iterator[str]:
    """Yield errors in the weights of a folder, reading headers only."""
    for path in sorted(folder.glob(WEIGHTS)):
        problem = _file_problem(path)
        if problem is not None:
            yield f"{path.name} {problem}"
    yield from (f"{name} is missing" for name in _missing_shards(folder))


def _file_problem(path: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                return "is a pointer of Git LFS: `git lfs pull` fetches the weights"
        with safe_open(path, framework="numpy"):
            return None
    except SafetensorError as error:
        return f"is truncated or damaged ({error}): download it again"
    except OSError as error:
        return f"cannot be read: {describe_os_error(error)}"


def _missing_shards(folder: Path) -> list[str]:
    """List the files that the model's index names and that are missing."""
    index = folder / _INDEX
    try:
        if index.stat().st_size > WEIGHTS_INDEX_BYTES_MAX:
            return []
        shards = json.loads(index.read_bytes())["weight_map"].values()
        named = {name for name in shards if isinstance(name, str) and "/" not in name}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # no index, or one that mlx-lm rejects by itself
    return sorted(name for name in named if not (folder / name).exists())
