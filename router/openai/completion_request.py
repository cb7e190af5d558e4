"""The body of POST /v1/completions: raw prompts, no chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fabric.turn.generation import IdentityKind
from router.api.adapter import Several
from router.http.fields import Fields, refuse, require_text, unsupported
from router.http.turn_headers import expected_next
from router.limits import ANSWERS_MAX, PROMPTS_MAX, TOKEN_ID_MAX, TOP_LOGPROBS_MAX
from router.openai.request import (
    OpenAiRequest,
    parse_count,
    parse_identity,
    parse_priority,
    parse_retention_s,
    parse_stream,
)
from router.openai.sampling import parse_sampling, tokens_limit
from router.prompt import Prompt, raw_prompt, tokens_prompt

TOKENS_DEFAULT: Final = 16  # what OpenAI documents for this route, unlike for chat


@dataclass(frozen=True, slots=True)
class CompletionRequest(OpenAiRequest):
    """A checked request for completions."""

    only_reads: bool  # nothing is to be said


def parse_completion(headers: Mapping[str, str], body: dict[str, Any]) -> CompletionRequest:
    """Check a completion body; raise RejectedError naming the first wrong parameter."""
    fields = Fields(body)
    model = require_text(fields.require("model"), "model")
    echo = fields.flag("echo")
    prompts = [replace(prompt, echo=echo) for prompt in _prompts(fields)]
    if fields.raw("suffix") not in (None, ""):
        unsupported("suffix", "this server only continues prompts")
    stream, include_usage = parse_stream(fields)
    only_reads = fields.raw("max_tokens") == 0
    sampling = parse_sampling(
        fields,
        max_tokens=1 if only_reads else tokens_limit(fields, "max_tokens") or TOKENS_DEFAULT,
        logprobs=fields.integer("logprobs", 0, TOP_LOGPROBS_MAX),
    )
    identity = parse_identity(headers, fields)
    if identity.kind is IdentityKind.AGENT and (echo or len(prompts) > 1):
        name = "echo" if echo else "prompt"
        refuse(name, "an agent (X-Agent-ID) has one prompt, and remembers it")
    return CompletionRequest(
        model=model,
        identity=identity,
        prompt=prompts[0],
        sampling=sampling,
        stream=stream,
        include_usage=include_usage,
        priority=parse_priority(headers, fields),
        retain_s=parse_retention_s(fields),
        prefetch=expected_next(headers),
        several=_several(fields, prompts, stream=stream),
        only_reads=only_reads,
        is_whole_conversation=False,
    )


def _several(fields: Fields, prompts: Sequence[Prompt], *, stream: bool) -> Several | None:
    """Read how many answers are wanted; raise RejectedError where they are too many."""
    shown = parse_count(fields, "n") or 1
    count = parse_count(fields, "best_of") or shown
    if count < shown:
        refuse("best_of", f"must be at least n, which is {shown}")
    if stream and count > shown:
        refuse("best_of", "the best are known only at the end: leave out stream")
    if count * len(prompts) > ANSWERS_MAX:
        refuse("prompt", f"more than {ANSWERS_MAX} answers to all prompts")
    return Several(tuple(prompts), count, shown) if count * len(prompts) > 1 else None


def _prompts(fields: Fields) -> list[Prompt]:
    """Read a text, several, a list of tokens, or several of those."""
    given = fields.require("prompt")
    if not isinstance(given, list):
        return [_text(require_text(given, "prompt"))]
    if not given:
        refuse("prompt", "it is empty")
    if not isinstance(given[0], (str, list)):
        return [_tokens(given, "prompt")]
    if len(given) > PROMPTS_MAX:
        refuse("prompt", f"more than {PROMPTS_MAX} prompts")
    return [
        _tokens(each, f"prompt[{at}]")
        if isinstance(each, list)
        else _text(require_text(each, f"prompt[{at}]"), f"prompt[{at}]")
        for at, each in enumerate(given)
    ]


def _text(text: str, param: str = "prompt") -> Prompt:
    if not text:
        refuse(param, "it is empty")
    return raw_prompt(text)


def _tokens(given: list[Any], param: str) -> Prompt:
    if not given:
        refuse(param, "it is empty")
    for each in given:
        if type(each) is not int or not 0 <= each <= TOKEN_ID_MAX:
            refuse(param, "expected token ids", "invalid_type")
    return tokens_prompt(given)
