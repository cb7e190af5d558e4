"""What clients may pass to a model's chat template, in any dialect."""

from typing import Any, Final

from fabric.template_options import DATES_OPTION, RESERVED_OPTIONS, RESTORE_OPTION
from router.http.fields import Fields, kind_of, refuse

# Templates have either; and of efforts they know three.
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
_EFFORTS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def with_effort(options: dict[str, Any], effort: str) -> None:
    """Add an effort, in words that templates know, to options that do not say otherwise."""
    options.setdefault("reasoning_effort", _EFFORTS.get(effort, effort))
    if effort == "none":
        for name in THINKING_SWITCHES:
            options.setdefault(name, False)


def template_options(fields: Fields) -> dict[str, Any]:
    """Read `chat_template_kwargs`, an extension that all servers of local models know."""
    options = dict(fields.object("chat_template_kwargs") or {})
    for name in options:
        if name in RESERVED_OPTIONS:
            refuse(f"chat_template_kwargs.{name}", "it belongs to the server")
    for name in (RESTORE_OPTION, DATES_OPTION):
        value = options.get(name, True)
        if not isinstance(value, bool):
            why = f"expected a boolean, got {kind_of(value)}"
            refuse(f"chat_template_kwargs.{name}", why, "invalid_type")
    return options
