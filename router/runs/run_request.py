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
from router.scenario.source import ScenarioSource, shipped_source


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Request for a run, whose scenario is not read yet."""

    shipped: str | None  # either this or `yaml` is set
    yaml: str | None
    files: dict[str, str]
    variables: dict[str, str]
    name: str | None
    namespace: str
    model: str | None
    repeats: int
    is_compared: bool

    def source(self) -> ScenarioSource:
        """Return the scenario's source; raise NotFoundError for an unknown shipped name."""
        if self.shipped is not None:
            return shipped_source(self.shipped, self.variables)
        assert self.yaml is not None, "checked by parse_run_request"
        return ScenarioSource(self.yaml, self.files, self.variables)


def parse_run_request(body: dict[str, Any]) -> RunRequest:
    """Return a checked body; raise RejectedError naming the first invalid parameter."""
    fields = Fields(body)
    fields.allow_only("scenario", "yaml", "files", "set", "run", "as", "model", "repeat", "cold")
    shipped, yaml = fields.text("scenario"), fields.text("yaml", SCENARIO_BYTES_MAX)
    files = _texts(fields, "files", SCENARIO_FILES_MAX, SCENARIO_FILE_BYTES_MAX)
    variables = _texts(fields, "set", SCENARIO_VARIABLES_MAX, SCENARIO_TEXT_CHARS_MAX)
    request = RunRequest(
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
        refuse("scenario", "send either scenario, the name of a shipped one, or yaml")
    if files and yaml is None:
        refuse("files", "only allowed with yaml: a shipped scenario has its own files")
    return request


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
