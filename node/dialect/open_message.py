"""A conversation that ends within its last message: an answer is begun, and the model goes on.

Templates only write whole messages. So a mark is put behind what there is of the last one, and
the text is cut where it comes out; what the template writes behind it would end the message.
"""

from typing import Any, Final

from fabric.errors import RejectedError

_MARK: Final = "\ue0f1\ue0f5\ue0f1"  # of no script: nothing is trimmed, folded or escaped in it


def left_open(messages: list[Any]) -> list[Any]:
    """Mark the end of the last message's text, or of its thought where it says nothing yet."""
    last = messages[-1]
    thought, text = last.get("reasoning_content"), last.get("content") or ""
    key = "content" if text or not thought else "reasoning_content"
    return [*messages[:-1], {**last, key: (last.get(key) or "") + _MARK}]


def up_to_mark(text: str) -> str:
    """Return the text up to the last mark; raise RejectedError where the template dropped it."""
    at = text.rfind(_MARK)
    if at < 0:
        message = "the model's chat template leaves out the answer that is to be continued"
        raise RejectedError(message, code="template_refused", param="messages")
    return text[:at]
