"""What every view returns."""

from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]  # a JSON object whose names docs/http-api.md explains
