"""What clients may pass to a model's chat template, in any dialect."""

from typing import Any

from router.http.fields import Fields, refuse

# These would replace what the node itself passes to the template.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def template_options(fields: Fields) -> dict[str, Any]:
    """Read `chat_template_kwargs`, an extension that all servers of local models know."""
    options = dict(fields.object("chat_template_kwargs") or {})
    for name in options:
        if name in _RESERVED:
            refuse(f"chat_template_kwargs.{name}", "it belongs to the server")
    return options
