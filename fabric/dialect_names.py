"""Names of the formats that the settings `node.tool_parser` and `node.reasoning_parser` accept.

The formats are defined in `node/dialect/families/`; a test keeps these names equal to theirs.
"""

from typing import Final

PARSER_MODES: Final = frozenset({"auto", "none", "harmony"})
CALL_NAMES: Final = frozenset(
    {
        *("apertus", "command", "command_r", "deepseek", "deepseek_v32", "function_gemma"),
        *("gemma", "gemma4", "glm", "glm47", "granite", "hermes", "hunyuan", "json"),
        *("json_tools", "kimi_k2", "kimi_k3", "laguna", "llama", "llama4", "longcat"),
        *("minicpm5", "minimax_m2", "mistral", "muse_spark", "nemotron", "phi4"),
        *("qwen3_coder", "seed_oss"),
    }
)
THOUGHT_NAMES: Final = frozenset(
    {"apertus", "command", "gemma4", "longcat", "mistral", "seed", "think"}
)
