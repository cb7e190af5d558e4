"""Functions among a request's tools, as most APIs have them."""

from typing import Any

from router.http.fields import Fields, refuse, require_object, require_text, unsupported
from router.limits import TOOLS_MAX


def parse_functions(fields: Fields) -> list[dict[str, Any]]:
    """Check `tools`, all of which are functions."""
    tools = []
    for index, item in enumerate(fields.items("tools", TOOLS_MAX) or []):
        tool = Fields(require_object(item, f"tools[{index}]"), f"tools[{index}].")
        if require_text(tool.require("type"), tool.param("type")) != "function":
            unsupported(tool.param("type"), "only functions are supported")
        tools.append(checked_function(tool))
    return tools


def checked_function(tool: Fields) -> dict[str, Any]:
    """Check one; return it as templates get it."""
    function = require_object(tool.require("function"), tool.param("function"))
    inner = Fields(function, tool.param("function."))
    if not require_text(inner.require("name"), inner.param("name")):
        refuse(inner.param("name"), "it is empty")
    inner.text("description")
    inner.object("parameters")
    inner.flag("strict")
    return {"type": "function", "function": function}
