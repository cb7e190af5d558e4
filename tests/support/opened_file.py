"""An open file of a test's disk: each read calls that disk."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A file of a disk that has `read_into(name, offset, buffers)` and `size_bytes(name)`."""

    disk: Any
    name: str

    @property
    def size_bytes(self) -> int:
        return int(self.disk.size_bytes(self.name))

    def read_into(self, buffers: Any, offset: int) -> int:
        return int(self.disk.read_into(self.name, offset, buffers))
