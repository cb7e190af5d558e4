"""Files that only their owner may read: keys, certificates, and what tells of them."""

import os
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Replace a file at once, readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    temporary.replace(path)
