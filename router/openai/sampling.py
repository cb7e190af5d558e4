"""How to choose tokens, as OpenAI spells it, with the common extensions for local models."""

from typing import Any

from fabric.limits import COMPLETION_TOKENS_MAX
from fabric.turn.generation import Sampling
from router.api.sampling_fields import parse_seed, parse_temperature, parse_top_p, stop_strings
from router.http.fields import Fields, refuse
from router.limits import LOGIT_BIAS_MAX, STOP_STRINGS_MAX, TOKEN_DIGITS_MAX
from router.openai.response_format import parse_output_format

_BIAS_MAX = 100.0


def parse_sampling(fields: Fields, *, max_tokens: int, logprobs: int | None) -> Sampling:
    """Read the sampling fields; `max_tokens` and `logprobs` differ between the two APIs."""
    top_k = fields.integer("top_k", -1, 1 << 31) or 0
    return Sampling(
        max_tokens=max_tokens,
        temperature=parse_temperature(fields, 2.0),
        top_p=parse_top_p(fields),
        top_k=max(0, top_k),  # -1 turns it off elsewhere, too
        min_p=_or(fields.number("min_p", 0.0, 1.0), 0.0),
        seed=parse_seed(fields),
        stop=_stop(fields),
        logprobs=logprobs,
        logit_bias=_logit_bias(fields),
        repetition_penalty=_or(fields.number("repetition_penalty", 0.01, 10.0), 1.0),
        frequency_penalty=_or(fields.number("frequency_penalty", -2.0, 2.0), 0.0),
        presence_penalty=_or(fields.number("presence_penalty", -2.0, 2.0), 0.0),
        ignore_eos=fields.flag("ignore_eos"),
        output=parse_output_format(fields),
    )


def tokens_limit(fields: Fields, name: str) -> int | None:
    """Read one of the spellings of max_tokens; other servers' clients say -1 for no limit."""
    value = fields.raw(name)
    if value == -1 and isinstance(value, int):
        return COMPLETION_TOKENS_MAX
    return fields.integer(name, 1, COMPLETION_TOKENS_MAX)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stop(fields: Fields) -> tuple[str, ...]:
    value: Any = fields.raw("stop")
    param = fields.param("stop")
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else fields.items("stop", STOP_STRINGS_MAX)
    # Forms that were left empty say nothing.
    return stop_strings([item for item in items or [] if item != ""], param)


def _logit_bias(fields: Fields) -> dict[str, float]:
    bias = fields.object("logit_bias") or {}
    param = fields.param("logit_bias")
    if len(bias) > LOGIT_BIAS_MAX:
        refuse(param, f"more than {LOGIT_BIAS_MAX} entries")
    entries = Fields(bias, f"{param}.")
    values: dict[str, float] = {}
    for token in bias:
        if not (token.isascii() and token.isdigit() and len(token) <= TOKEN_DIGITS_MAX):
            refuse(param, "its keys are token ids")
        values[token] = _or(entries.number(token, -_BIAS_MAX, _BIAS_MAX), 0.0)
    return values
