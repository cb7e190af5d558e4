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
# A node's own, not a template's: whether earlier answers come back as they were, and whether dates
# leave the system prompt.
RESTORE_OPTION: Final = "restore_reasoning"
DATES_OPTION: Final = "move_dates"
