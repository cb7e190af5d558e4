"""Refuse a model that no node can load before anything is started."""

from pathlib import Path

from router.cli.errors import MISUSED, CommandError
from router.cli.weights_check import WEIGHTS, weight_problems

BUNDLED = Path(__file__).resolve().parents[2] / "node" / "bundled"
_CONFIG = "config.json"


def bundled_models() -> list[str]:
    """Name the models that come with macfabric."""
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{_CONFIG}"))


def chosen_model(model: str, said: str = "--model") -> str:
    """Return a bundled model's name, or the absolute path of a folder; raise CommandError.

    `said`: by which option or setting it was chosen.
    """
    bundled = bundled_models()
    if model in bundled:
        return model
    folder = Path(model).expanduser()
    if not folder.is_dir():
        message = (
            f"{said} {model}: there is no such folder, and no bundled model of that name "
            f"({', '.join(bundled)})"
        )
        raise CommandError(message, MISUSED)
    for pattern, what in ((_CONFIG, _CONFIG), (WEIGHTS, "weights (*.safetensors)")):
        if not any(folder.glob(pattern)):
            message = f"{said} {model}: that folder holds no {what}: mlx-lm cannot load it"
            raise CommandError(message, MISUSED)
    problems = list(weight_problems(folder))
    if problems:
        message = f"{said} {model}: {'; '.join(problems)}"
        raise CommandError(message, MISUSED)
    return str(folder.resolve())


def weights_bytes(model: str) -> int | None:
    """Return what a model's weights take on disk, and so in memory; None if they are not here."""
    folder = BUNDLED / model if model in bundled_models() else Path(model).expanduser()
    return sum(path.stat().st_size for path in folder.glob(WEIGHTS)) or None


def require_on_every_mac(model: str, said: str) -> None:
    """Raise CommandError unless this Mac has the model where every other one looks for it."""
    chosen = chosen_model(model, said)
    if chosen != model and not Path(model).expanduser().is_absolute():
        message = f"{said} {model}: name the folder from / or ~ on: every Mac looks for its own"
        raise CommandError(message, MISUSED)
