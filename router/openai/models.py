"""Models in OpenAI's dialect, with their limits as other servers and Codex spell them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from router.api.models import ListedModel
from router.limits import CODEX_OUTPUT_BYTES_MAX

# Tokens of prompt and answer together: vLLM's name, OpenRouter's, Groq's, and LM Studio's two.
CONTEXT_FIELDS: Final = (
    "max_model_len",
    "context_length",
    "context_window",
    "max_context_length",
    "loaded_context_length",
)
# Tokens of one answer: LiteLLM's name, OpenRouter's and Groq's.
ANSWER_FIELDS: Final = ("max_output_tokens", "max_completion_tokens")
VERSION_PARAMETER: Final = "client_version"  # of Codex, which then reads `models`
# Codex sends these in place of its own instructions, which exist only for models in its list.
_CODEX_INSTRUCTIONS: Final = """\
You are a coding agent in a user's terminal. You work in the current directory with the tools that \
you are given: they run commands, read files and change them.

- Look before you change anything: list and read the files that the task is about, and follow \
AGENTS.md files where they exist.
- Do the whole task, step by step, and call tools instead of describing what you would do.
- Make the smallest change that solves the cause. Keep the style of the code around it, and leave \
other files alone.
- Never undo changes that you did not make, and never commit unless the user asks for it.
- Afterwards run the tests or the program, read the output, and fix what fails.
- If a command fails, read its error and try another way. Ask the user only for what you cannot \
find out.
- Finish with a short summary: what you changed, where, and how you checked it.
"""


class OpenAiModels:
    """Models, alone and as a list."""

    def model(self, model: ListedModel) -> dict[str, Any]:
        row = {
            "id": model.name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "macfabric",
        }
        if model.context_tokens_max is None:
            return row
        context = dict.fromkeys(CONTEXT_FIELDS, model.context_tokens_max)
        return row | context | dict.fromkeys(ANSWER_FIELDS, model.completion_tokens_max)

    def listing(self, models: Sequence[ListedModel], query: Mapping[str, str]) -> dict[str, Any]:
        rows = {"object": "list", "data": [self.model(model) for model in models]}
        if VERSION_PARAMETER not in query:
            return rows
        return rows | {"models": [_catalog_entry(model) for model in models]}


def _catalog_entry(model: ListedModel) -> dict[str, Any]:
    """Return a model for Codex, which drops the whole catalog if one field is missing.

    Source: `ModelInfo` in `codex-rs/protocol/src/openai_models.rs` of openai/codex; tried with
    0.169.
    """
    context = model.context_tokens_max
    limits = {} if context is None else {"context_window": context, "max_context_window": context}
    return {
        "slug": model.name,
        "display_name": model.name,
        "description": None,
        "default_reasoning_level": None,
        "supported_reasoning_levels": [],
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": _CODEX_INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "bytes", "limit": CODEX_OUTPUT_BYTES_MAX},
        "supports_parallel_tool_calls": True,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        **limits,
    }
