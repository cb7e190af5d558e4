"""Errors as clients of Ollama read them, who look here for what is not."""

from fabric.errors import FabricError
from router.http.dialect import ErrorBody


class PlainErrors:
    """A text, without type or code."""

    def error(self, error: FabricError) -> ErrorBody:
        return ErrorBody({"error": error.message})
