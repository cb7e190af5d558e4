"""Fixtures of tokenizers."""

import pytest

from node.mlx import chat_tokenizer, token_text


@pytest.fixture(scope="module")
def small_pieces():
    """Cut texts wherever that is allowed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_text, "PIECE_CHARS", 1)
        patch.setattr(chat_tokenizer, "_SLICE_CHARS", 8)
        yield
