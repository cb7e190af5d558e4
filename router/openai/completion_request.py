"""The body of POST /v1/completions: raw prompts, no chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fabric.sampling_defaults import left_out_fields
from fabric.turn.generation import IdentityKind
from router.api.adapter import AnswerBatch
from router.http.refusals import refuse, require_text
from router.http.schema import (
    Flag,
    Integer,
    ObjectOf,
    Parsed,
    Text,
    Unsupported,
    either,
    optional,
    required,
)
from router.http.turn_headers import expected_next
from router.limits import ANSWERS_MAX, PROMPTS_MAX, TOKEN_ID_MAX, TOP_LOGPROBS_MAX
from router.openai.request import (
    COUNT,
    STREAM_OPTIONS,
    TOKEN_LIMIT,
    OpenAiRequest,
    SamplingBody,
    require_stream,
)
from router.prompt import Prompt, raw_prompt, tokens_prompt

_LIMIT: Final = replace(TOKEN_LIMIT, low=0)
TOKENS_DEFAULT: Final = 16  # what OpenAI documents for this route, unlike for chat


def _prompts(value: Any, param: str) -> list[Prompt]:
    """Read one prompt or several, as texts or as lists of tokens."""
    if not isinstance(value, list):
        return [_text(value, param)]
    if not value:
        refuse(param, "it is empty")
    if not isinstance(value[0], (str, list)):
        return [_tokens(value, param)]
    if len(value) > PROMPTS_MAX:
        refuse(param, f"more than {PROMPTS_MAX} prompts")
    return [
        _tokens(item, f"{param}[{index}]")
        if isinstance(item, list)
        else _text(item, f"{param}[{index}]")
        for index, item in enumerate(value)
    ]


def _text(value: Any, param: str) -> Prompt:
    text = require_text(value, param)
    return raw_prompt(text) if text else refuse(param, "it is empty")


def _tokens(ids: list[Any], param: str) -> Prompt:
    if not ids:
        refuse(param, "it is empty")
    for token in ids:
        if type(token) is not int or not 0 <= token <= TOKEN_ID_MAX:
            refuse(param, "expected token ids", "invalid_type")
    return tokens_prompt(ids)


_TEXT: Final = Text(chars_min=1).schema()
_IDS: Final = {"type": "array", "items": Integer(0, TOKEN_ID_MAX).schema(), "minItems": 1}
_ONE: Final = either(_TEXT, _IDS)
_PROMPTS: Final = {"type": "array", "items": _ONE, "maxItems": PROMPTS_MAX, "minItems": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBody(SamplingBody):
    """Body of POST /v1/completions."""

    model: str = required(Text())
    prompt: list[Prompt] = required(Parsed(_prompts, either(_TEXT, _IDS, _PROMPTS)))
    echo: bool = optional(Flag(), False)
    suffix: Any = optional(Unsupported("this server only continues prompts", ("",)))
    stream: bool = optional(Flag(), False)
    include_usage: bool | None = optional(STREAM_OPTIONS, name="stream_options")
    max_tokens: int | None = optional(_LIMIT)
    logprobs: int | None = optional(Integer(0, TOP_LOGPROBS_MAX))
    n: int = optional(COUNT, 1)
    best_of: int | None = optional(COUNT)


COMPLETION_BODY: Final = ObjectOf(CompletionBody)


@dataclass(frozen=True, slots=True)
class CompletionRequest(OpenAiRequest):
    """Checked request for completions."""

    only_reads: bool  # the prompt is computed, and nothing is generated


def parse_completion(headers: Mapping[str, str], sent: dict[str, Any]) -> CompletionRequest:
    """Check a completion body; raise RejectedError naming the first wrong parameter."""
    body = COMPLETION_BODY.read(sent)
    prompts = [replace(prompt, echo=body.echo) for prompt in body.prompt]
    require_stream(body.include_usage, stream=body.stream)
    only_reads = body.max_tokens == 0
    identity = body.identity(headers)
    if identity.kind is IdentityKind.AGENT and (body.echo or len(prompts) > 1):
        name = "echo" if body.echo else "prompt"
        refuse(name, "an agent (X-Agent-ID) has one prompt, which it keeps")
    return CompletionRequest(
        model=body.model,
        identity=identity,
        prompt=prompts[0],
        sampling=body.sampling(
            max_tokens=1 if only_reads else body.max_tokens or TOKENS_DEFAULT,
            logprobs=body.logprobs,
        ),
        stream=body.stream,
        include_usage=bool(body.include_usage),
        priority=body.priority(headers),
        retain_s=body.retain_s,
        prefetch=expected_next(headers),
        left_out=left_out_fields(body),
        batch=_batch(body, prompts),
        only_reads=only_reads,
        is_whole_conversation=False,
    )


def _batch(body: CompletionBody, prompts: Sequence[Prompt]) -> AnswerBatch | None:
    """Return the answer counts, if more than one is wanted; raise RejectedError for too many."""
    shown = body.n
    count = body.best_of or shown
    if count < shown:
        refuse("best_of", f"must be at least n, which is {shown}")
    if body.stream and count > shown:
        refuse("best_of", "the best answers are known only at the end: leave out stream")
    if count * len(prompts) > ANSWERS_MAX:
        refuse("prompt", f"more than {ANSWERS_MAX} answers to all prompts")
    return AnswerBatch(tuple(prompts), count, shown) if count * len(prompts) > 1 else None
