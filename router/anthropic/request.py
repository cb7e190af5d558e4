"""The body of POST /v1/messages: unknown fields are ignored, known ones are checked."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from fabric.codec import parse_json
from fabric.errors import RejectedError
from fabric.limits import COMPLETION_TOKENS_MAX
from fabric.turn.generation import Identity, Priority, Sampling
from fabric.turn.output_format import OutputFormat
from router.anthropic.content import Notes, note_cache_control
from router.anthropic.context_management import parse_context_management
from router.anthropic.errors import THREAD_UNSUPPORTED
from router.anthropic.messages import parse_conversation
from router.anthropic.tools import parse_choice, parse_tools
from router.api.adapter import Asked
from router.api.answer_format import answer_format
from router.api.begun_answer import is_begun, refuse_format
from router.api.sampling_fields import parse_temperature, parse_top_p, stop_strings
from router.api.template_options import THINKING_SWITCHES, template_options, with_effort
from router.http.fields import Fields, refuse, require_text, unsupported
from router.http.turn_headers import expected_next, identify, priority_of
from router.limits import KEY_CHARS_MAX, STOP_STRINGS_MAX
from router.policies.counted_edit import CountedEdit
from router.prompt import Prompt, chat_prompt

_THINKING: Final = ("enabled", "adaptive", "disabled")
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_TIERS: Final = ("auto", "standard_only")
_ELSEWHERE: Final = ("mcp_servers", "container", "fallbacks")  # run by Anthropic
_WITHOUT_EFFECT: Final = ("diagnostics", "speed", "inference_geo")


@dataclass(frozen=True, slots=True)
class AnthropicRequest(Asked):
    """A checked request, and what its answer depends on."""

    shows_thoughts: bool
    only_warms: bool  # nothing is to be said: the prompt's cache is wanted, for later
    is_managed: bool = False  # the answer tells what was cleared of its context


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """Prompt of a request as both routes read it."""

    model: str
    prompt: Prompt
    shows_thoughts: bool
    edits: tuple[CountedEdit, ...] | None  # None: it says nothing of them


def parse_prompt(fields: Fields, notes: Notes) -> AskedPrompt:
    """Check what becomes tokens; raise RejectedError naming the first wrong parameter."""
    model = require_text(fields.require("model"), "model")
    messages = parse_conversation(fields, notes)
    tools = parse_tools(fields, notes)
    reads_calls, calls = parse_choice(fields, tools)
    for name in _ELSEWHERE:
        if fields.raw(name):
            unsupported(name, "nothing is run here but the model")
    if fields.raw("thread") is not None:  # else only what is new would come, and count for all
        refuse("thread", "no conversation is held here: send all of it", THREAD_UNSUPPORTED)
    for name in _WITHOUT_EFFECT:
        if fields.raw(name) is not None:
            notes.ignore(name)
    note_cache_control(fields, notes)
    shows_thoughts = _thinking(fields, notes)
    options = template_options(fields)
    effort = _effort(fields)
    if effort is not None:
        with_effort(options, effort)
    for name in THINKING_SWITCHES:
        options.setdefault(name, shows_thoughts)
    continues = is_begun(messages, "messages")
    made = chat_prompt(messages, tools or None, options, continues=continues)
    prompt = replace(made, reads_calls=reads_calls, calls=calls)
    return AskedPrompt(model, prompt, shows_thoughts, parse_context_management(fields, notes))


def parse_request(headers: Mapping[str, str], body: dict[str, Any]) -> AnthropicRequest:
    """Check a body; raise RejectedError naming the first parameter that is wrong."""
    fields, notes = Fields(body), Notes()
    said = parse_prompt(fields, notes)
    stream, only_warms = fields.flag("stream"), fields.raw("max_tokens") == 0
    if stream and only_warms:
        refuse("max_tokens", "nothing can be streamed of an answer without tokens")
    sampling = _sampling(fields)
    if said.prompt.continues:
        refuse_format(sampling, "output_config.format", said.prompt.calls)
    if fields.raw("service_tier") not in (None, *_TIERS):
        refuse("service_tier", f"expected one of {', '.join(_TIERS)}")
    return AnthropicRequest(
        model=said.model,
        identity=_identity(headers, fields),
        prompt=said.prompt,
        sampling=sampling,
        stream=stream,
        priority=priority_of(headers, Priority.INTERACTIVE),
        prefetch=expected_next(headers),
        shows_thoughts=said.shows_thoughts,
        only_warms=only_warms,
        retain_s=notes.retain_s,
        ignored=tuple(notes.ignored),
        own_edits=said.edits or (),
        is_managed=said.edits is not None,
    )


def _sampling(fields: Fields) -> Sampling:
    fields.require("max_tokens")
    max_tokens = fields.integer("max_tokens", 0, COMPLETION_TOKENS_MAX)
    assert max_tokens is not None, "required"
    return Sampling(
        max_tokens=max(1, max_tokens),
        temperature=parse_temperature(fields, 1.0),
        top_p=parse_top_p(fields),
        top_k=fields.integer("top_k", 0, 1 << 31) or 0,
        stop=stop_strings(fields.items("stop_sequences", STOP_STRINGS_MAX) or [], "stop_sequences"),
        output=_format(fields),
    )


def _thinking(fields: Fields, notes: Notes) -> bool:
    """Say whether the model is to think aloud; without a word of the client it is not."""
    thinking = fields.object("thinking")
    if thinking is None:
        return False
    inner = Fields(thinking, "thinking.")
    kind = require_text(inner.require("type"), inner.param("type"))
    if kind not in _THINKING:
        refuse(inner.param("type"), f"expected one of {', '.join(_THINKING)}")
    if kind == "enabled":
        inner.require("budget_tokens")
    if inner.integer("budget_tokens", 1, COMPLETION_TOKENS_MAX) is not None:
        notes.ignore("thinking.budget_tokens")
    return kind != "disabled"


def _effort(fields: Fields) -> str | None:
    config = Fields(fields.object("output_config") or {}, "output_config.")
    effort = config.text("effort")
    if effort is not None and effort not in _EFFORTS:
        refuse(config.param("effort"), f"expected one of {', '.join(_EFFORTS)}")
    return effort


def _format(fields: Fields) -> OutputFormat | None:
    """Read the answer's format, by its name of today or of the beta."""
    config = Fields(fields.object("output_config") or {}, "output_config.")
    for section, name in ((config, "format"), (fields, "output_format")):
        form = section.object(name)
        if form is not None:
            inner = Fields(form, section.param(f"{name}."))
            return answer_format(inner, strict_by_default=True)
    return None


def _identity(headers: Mapping[str, str], fields: Fields) -> Identity:
    metadata = Fields(fields.object("metadata") or {}, "metadata.")
    user = metadata.text("user_id", KEY_CHARS_MAX)
    return identify(headers, [metadata.text("agent_id", KEY_CHARS_MAX), _session_of(user), user])


def _session_of(user: str | None) -> str | None:
    """Find the session that coding agents name in a user's id, which is JSON with them."""
    if user is None or not user.startswith("{"):
        return None
    try:
        told = parse_json(user)
    except RejectedError:
        return None
    session = told.get("session_id") if isinstance(told, dict) else None
    return session if isinstance(session, str) else None
