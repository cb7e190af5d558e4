"""Names of chat template options that clients cannot set, or that the node itself reads."""

from typing import Final

# They would replace arguments that the node passes to the template, or change how it is rendered.
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
# Options that the node reads: restore earlier answers' reasoning, and move dates out of the system
# prompt.
RESTORE_OPTION: Final = "restore_reasoning"
DATES_OPTION: Final = "move_dates"
