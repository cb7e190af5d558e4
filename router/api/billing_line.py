"""The line with which some clients head their system prompt for their vendor's billing.

It means nothing to a model, and changes what every conversation begins with. Proxies hand it on in
other dialects than its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fabric.turn.messages import Message, MessageRole

BILLING_HEADER: Final = "x-anthropic-billing-header"


def without_billing_line(text: str) -> str:
    """Return a system prompt's text without such a first line."""
    return text.partition("\n")[2] if text.startswith(f"{BILLING_HEADER}:") else text


def without_billing_lines(messages: Sequence[Message]) -> list[Message]:
    """Return messages without such lines, and without system messages that were nothing else."""
    kept = []
    for message in messages:
        texts = tuple(without_billing_line(text) for text in message.texts)
        if message.role is not MessageRole.SYSTEM or texts == message.texts:
            kept.append(message)
        elif any(texts):
            kept.append(replace(message, texts=tuple(text for text in texts if text)))
    return kept


def ignored_lines(messages: Sequence[Message]) -> tuple[str, ...]:
    """Name what `without_billing_lines` leaves out of these, for answers to tell."""
    return (BILLING_HEADER,) if without_billing_lines(messages) != list(messages) else ()
