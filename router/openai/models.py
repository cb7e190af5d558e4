"""Models as OpenAI lists them."""

from typing import Any


class OpenAiModels:
    """One object each, and a list of them."""

    def model(self, name: str, created_s: int) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created_s, "owned_by": "macfabric"}

    def listing(self, models: list[dict[str, Any]]) -> dict[str, Any]:
        return {"object": "list", "data": models}
