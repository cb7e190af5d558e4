"""The body of POST /v1/scenarios."""

from dataclasses import dataclass
from typing import Any, Final

from router.http.refusals import refuse, require_object, require_text
from router.http.schema import Flag, Integer, ObjectOf, Parsed, Text, optional
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

_NAME: Final = Text(
    SCENARIO_KEY_CHARS_MAX, pattern=rf"^[a-z0-9][a-z0-9_-]{{0,{SCENARIO_KEY_CHARS_MAX - 1}}}$"
)


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


def _texts(count_max: int, chars_max: int) -> Parsed:
    """Return the kind of named texts."""

    def read(value: Any, param: str) -> dict[str, str]:
        texts = require_object(value, param)
        if len(texts) > count_max:
            refuse(param, f"more than {count_max} texts")
        for name, text in texts.items():
            if len(name) > SCENARIO_PATH_CHARS_MAX:
                refuse(param, f"a name has more than {SCENARIO_PATH_CHARS_MAX} characters")
            if len(require_text(text, f"{param}.{name}")) > chars_max:
                refuse(f"{param}.{name}", f"longer than {chars_max:,} characters")
        return texts

    described = {"type": "object", "maxProperties": count_max}
    return Parsed(read, {**described, "additionalProperties": Text().schema()})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBody:
    """Body of POST /v1/scenarios."""

    scenario: str | None = optional(Text())
    yaml: str | None = optional(Text(SCENARIO_BYTES_MAX))
    files: dict[str, str] | None = optional(_texts(SCENARIO_FILES_MAX, SCENARIO_FILE_BYTES_MAX))
    variables: dict[str, str] | None = optional(
        _texts(SCENARIO_VARIABLES_MAX, SCENARIO_TEXT_CHARS_MAX), name="set"
    )
    run: str | None = optional(_NAME)
    namespace: str = optional(_NAME, "", "as")
    model: str | None = optional(Text())
    repeat: int = optional(Integer(1, SCENARIO_REPEATS_MAX), 1)
    cold: bool = optional(Flag(), False)


RUN_BODY: Final = ObjectOf(RunBody, is_strict=True)


def parse_run_request(sent: dict[str, Any]) -> RunRequest:
    """Return a checked body; raise RejectedError naming the first invalid parameter."""
    body = RUN_BODY.read(sent)
    if (body.scenario is None) == (body.yaml is None):
        refuse("scenario", "send either scenario, the name of a shipped one, or yaml")
    if body.files and body.yaml is None:
        refuse("files", "only allowed with yaml: a shipped scenario has its own files")
    return RunRequest(
        body.scenario,
        body.yaml,
        body.files or {},
        body.variables or {},
        body.run,
        body.namespace,
        body.model,
        body.repeat,
        body.cold,
    )
