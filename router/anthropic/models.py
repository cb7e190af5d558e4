"""Models as Anthropic lists them."""

from datetime import UTC, datetime
from typing import Any


class AnthropicModels:
    """One object each, and a page of all of them."""

    def model(self, name: str, created_s: int) -> dict[str, Any]:
        created = datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"type": "model", "id": name, "display_name": name, "created_at": created}

    def listing(self, models: list[dict[str, Any]]) -> dict[str, Any]:
        ends = (models[0]["id"], models[-1]["id"]) if models else (None, None)
        return {"data": models, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
