"""Options of a model's chat template: which names are the server's own, and no client's."""

from typing import Final

# These would replace what a node itself passes to the template, or how it is applied.
RESERVED_OPTIONS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
RESTORE_OPTION: Final = "restore_reasoning"  # a node's, not a template's: false leaves messages be
