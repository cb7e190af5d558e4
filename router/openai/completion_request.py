"""The body of POST /v1/completions: one raw prompt, no chat template."""

from collections.abc import Mapping
from typing import Any

from fabric.limits import TOP_LOGPROBS_MAX
from router.http.fields import Fields, refuse, require_text, unsupported
from router.http.turn_headers import expected_next
from router.openai.request import (
    OpenAiRequest,
    parse_identity,
    parse_priority,
    parse_retention_s,
    parse_stream,
)
from router.openai.sampling import parse_sampling, tokens_limit
from router.prompt import raw_prompt

TOKENS_DEFAULT = 16  # what OpenAI documents for this route, unlike for chat


def parse_completion(headers: Mapping[str, str], body: dict[str, Any]) -> OpenAiRequest:
    """Check a completion body; raise RejectedError naming the first wrong parameter."""
    fields = Fields(body)
    model = require_text(fields.require("model"), "model")
    text = _prompt(fields)
    for name in ("echo", "suffix"):
        if fields.raw(name) not in (None, False, ""):
            unsupported(name, "this server only continues the prompt")
    stream, include_usage = parse_stream(fields)
    sampling = parse_sampling(
        fields,
        max_tokens=tokens_limit(fields, "max_tokens") or TOKENS_DEFAULT,
        logprobs=fields.integer("logprobs", 0, TOP_LOGPROBS_MAX),
    )
    return OpenAiRequest(
        model=model,
        identity=parse_identity(headers, fields),
        prompt=raw_prompt(text),
        sampling=sampling,
        stream=stream,
        include_usage=include_usage,
        priority=parse_priority(headers, fields),
        retain_s=parse_retention_s(fields),
        prefetch=expected_next(headers),
    )


def _prompt(fields: Fields) -> str:
    prompt = fields.require("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, list):
        unsupported("prompt", "send one string: neither several prompts nor token ids")
    text = require_text(prompt, "prompt")
    if not text:
        refuse("prompt", "it is empty")
    return text
