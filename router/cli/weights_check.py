"""Are a model's weights whole: a broken download is found before anything is started."""

import json
from collections.abc import Iterator
from pathlib import Path

from router.cli.errors import describe_os_error
from router.limits import WEIGHTS_INDEX_BYTES_MAX

WEIGHTS = "*.safetensors"
_INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"


def weight_problems(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the weights of a folder, reading headers only."""
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
        return f"was cut short or is damaged ({error}): download it again"
    except OSError as error:
        return f"cannot be read: {describe_os_error(error)}"


def _missing_shards(folder: Path) -> list[str]:
    """List the files that the model's index names and the folder lacks."""
    index = folder / _INDEX
    try:
        if index.stat().st_size > WEIGHTS_INDEX_BYTES_MAX:
            return []
        shards = json.loads(index.read_bytes())["weight_map"].values()
        named = {name for name in shards if isinstance(name, str) and "/" not in name}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # none, or one that mlx-lm complains about by itself
    return sorted(name for name in named if not (folder / name).exists())
