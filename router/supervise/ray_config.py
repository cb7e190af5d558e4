"""Validation of a cluster file by Ray's own parser, without starting anything."""

import contextlib
import copy
import io
import re
from typing import Any

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^\S+ \S+\s+(?:ERROR|PANIC|WARNING|WARN|INFO)\s+\S+:\d+ -- ")


def ray_complaint(cluster: dict[str, Any]) -> str | None:
    """Return why Ray rejects the file's content, or None if it accepts it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            validate_config(prepare_config(copy.deepcopy(cluster)))
    except Exception as error:  # noqa: BLE001 - Ray answers with a dozen kinds
        return _reason(error, printed.getvalue())
    return None


def _reason(error: Exception, printed: str) -> str:
    """Return the reason in one line; Ray prints some reasons and raises others."""
    where = ".".join(str(part) for part in getattr(error, "absolute_path", ()))
    text = str(getattr(error, "message", None) or error)
    lines = [_PREFIX.sub("", _COLOUR.sub("", line)).strip() for line in printed.splitlines()]
    printed_reason = next((line for line in reversed(lines) if line), "")
    if text in ("", "None", "Printed."):
        text = printed_reason
    return f"{where}: {text}" if where else text or type(error).__name__
