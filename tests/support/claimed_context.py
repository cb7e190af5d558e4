"""The bundled recall model with a claimed context of any size."""

import json
import shutil
from pathlib import Path

from node.mlx.loaded_model import BUNDLED


def claiming(folder: Path, context_tokens: int) -> Path:
    """Copy the model into a folder of its own name; return that folder."""
    copy = folder / "recall"
    shutil.copytree(BUNDLED / "recall", copy)
    config = json.loads((copy / "config.json").read_text())
    config["max_position_embeddings"] = context_tokens
    (copy / "config.json").write_text(json.dumps(config))
    return copy
