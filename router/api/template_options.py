"""Options that clients may pass to a model's chat template, in any dialect."""

from typing import Any, Final

from fabric.template_options import DATES_OPTION, RESERVED_OPTIONS, RESTORE_OPTION
from router.http.refusals import refuse, require_object, wrong_type
from router.http.schema import Parsed

# Templates have one or the other, and know three efforts.
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
_EFFORTS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def with_effort(options: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Return options with an effort that templates know, unless the client set it there."""
    options = dict(options or {})
    if effort is not None:
        options.setdefault("reasoning_effort", _EFFORTS.get(effort, effort))
    if effort == "none":
        for name in THINKING_SWITCHES:
            options.setdefault(name, False)
    return options


def _template_options(value: Any, param: str) -> dict[str, Any]:
    options = require_object(value, param)
    for name in options:
        if name in RESERVED_OPTIONS:
            refuse(f"{param}.{name}", "it is reserved for the server")
    for name in (RESTORE_OPTION, DATES_OPTION):
        flag = options.get(name, True)
        if not isinstance(flag, bool):
            wrong_type(flag, f"{param}.{name}", "a boolean")
    return options


# `chat_template_kwargs`, an extension that all servers of local models have.
TEMPLATE_OPTIONS: Final = Parsed(_template_options, {"type": "object"})
