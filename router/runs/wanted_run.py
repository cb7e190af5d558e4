"""The body of POST /v1/scenarios."""

from dataclasses import dataclass
from typing import Any

from router.http.fields import Fields, refuse, require_text
from router.limits import (
    SCENARIO_BYTES_MAX,
    SCENARIO_FILE_BYTES_MAX,
    SCENARIO_FILES_MAX,
    SCENARIO_KEY_CHARS_MAX,
    SCENARIO_PATH_CHARS_MAX,
    SCENARIO_REPEATS_MAX,
    SCENARIO_TEXT_CHARS_MAX,
    SCENARIO_VARIABLES_MAX,
)
from router.scenario.script import Script, shipped_script


@dataclass(frozen=True, slots=True)
class WantedRun:
    """A request for a run, not yet looked into: its texts may be anything."""

    shipped: str | None  # exactly one of these two
    yaml: str | None
    files: dict[str, str]
    variables: dict[str, str]
    name: str | None
    namespace: str
    model: str | None
    repeats: int
    is_compared: bool

    def script(self) -> Script:
        """Return what the scenario is read from; raise NotFoundError for no shipped one."""
        if self.shipped is not None:
            return shipped_script(self.shipped, self.variables)
        assert self.yaml is not None, "one of both is there"
        return Script(self.yaml, self.files, self.variables)


def parse_wanted(body: dict[str, Any]) -> WantedRun:
    """Check a body; raise RejectedError naming the first parameter that is wrong."""
    fields = Fields(body)
    fields.allow_only("scenario", "yaml", "files", "set", "run", "as", "model", "repeat", "cold")
    shipped, yaml = fields.text("scenario"), fields.text("yaml", SCENARIO_BYTES_MAX)
    files = _texts(fields, "files", SCENARIO_FILES_MAX, SCENARIO_FILE_BYTES_MAX)
    variables = _texts(fields, "set", SCENARIO_VARIABLES_MAX, SCENARIO_TEXT_CHARS_MAX)
    wanted = WantedRun(
        shipped,
        yaml,
        files,
        variables,
        fields.text("run", SCENARIO_KEY_CHARS_MAX),
        fields.text("as", SCENARIO_KEY_CHARS_MAX) or "",
        fields.text("model"),
        fields.integer("repeat", 1, SCENARIO_REPEATS_MAX) or 1,
        fields.flag("cold"),
    )
    if (shipped is None) == (yaml is None):
        refuse("scenario", "send either the name of a shipped scenario or a text as yaml")
    if files and yaml is None:
        refuse("files", "they go with yaml: a shipped scenario has its own")
    return wanted


def _texts(fields: Fields, name: str, count_max: int, chars_max: int) -> dict[str, str]:
    texts = fields.object(name) or {}
    if len(texts) > count_max:
        refuse(fields.param(name), f"more than {count_max} texts")
    for key, value in texts.items():
        param = fields.param(name)
        if len(key) > SCENARIO_PATH_CHARS_MAX:
            refuse(param, f"a name has more than {SCENARIO_PATH_CHARS_MAX} characters")
        if len(require_text(value, f"{param}.{key}")) > chars_max:
            refuse(f"{param}.{key}", f"longer than {chars_max:,} characters")
    return texts
