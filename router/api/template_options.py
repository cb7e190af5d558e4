"""What clients may pass to a model's chat template, in any dialect."""

from typing import Any, Final

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

# Templates have either; and of efforts they know three.
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
_EFFORTS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def with_effort(options: dict[str, Any], effort: str) -> None:
    """Add an effort, in words that templates know, to options that do not say otherwise."""
    options.setdefault("reasoning_effort", _EFFORTS.get(effort, effort))
    if effort == "none":
        for name in THINKING_SWITCHES:
            options.setdefault(name, False)


def template_options(fields: Fields) -> dict[str, Any]:
    """Read `chat_template_kwargs`, an extension that all servers of local models know."""
    options = dict(fields.object("chat_template_kwargs") or {})
    for name in options:
        if name in _RESERVED:
            refuse(f"chat_template_kwargs.{name}", "it belongs to the server")
    return options
