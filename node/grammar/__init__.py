"""Grammars that answers must follow: compiled for a tokenizer and matched token by token."""
