"""OpenAPI descriptions of the routes of runs."""

from typing import Final

from router.api.openapi import (
    EVENT,
    EVENTS,
    FLAG,
    JSON,
    NAMED,
    OBJECT,
    TENANTS,
    WRITES,
    Described,
    Parameter,
    answer,
    array,
    integer,
    listing,
    number,
    one_of,
    ref,
    text,
    with_rare,
)
from router.http.schema import Schema, nullable
from router.runs.routes import LAST_ID_HEADER, PATH
from router.runs.run_folders import RunStatus
from router.runs.run_request import RUN_BODY

_SHORT: Final = {
    "id": text(),
    "object": one_of("scenario.run"),
    "scenario": text(),
    "title": nullable(text()),
    "state": one_of(*(status.value for status in RunStatus)),
    "holds": nullable(FLAG),
    "error": nullable(answer(code=text(), message=text())),
    "model": text(),
    "created_s": number(),
    "ended_s": nullable(number()),
    "turns": answer(done=integer(), total=integer()),
}
SCHEMAS: Final[dict[str, Schema]] = {
    "ScenarioRun": answer(**_SHORT),
    "ScenarioOutcome": answer(
        **_SHORT,
        runs=array(
            answer(
                number=integer(1),
                arm=one_of("warm", "cold"),
                transcript=array(
                    answer(
                        phase=text(),
                        round=integer(1),
                        speaker=text(),
                        text=text(),
                        steps=array(OBJECT),
                    )
                ),
                verdicts=OBJECT,
                report=array(
                    answer(
                        phase=text(),
                        agent=text(),
                        answers=integer(1),
                        ttft_median_s=number(),
                        prompt_tokens=integer(),
                        cached_tokens=integer(),
                        moved_bytes=integer(),
                        nodes=array(text()),
                        cached_share=number(),
                    )
                ),
            )
        ),
        savings=array(
            with_rare(
                answer(phase=nullable(text()), ttft=number(), total=number()),
                cold_cached_share=nullable(number()),
            )
        ),
    ),
}
_RUN: Final = Parameter("run", "path", text(), "A run's id.")
DESCRIBED: Final = (
    Described(
        "POST",
        PATH,
        "scenarios",
        "Starts or resumes a run; 200 if a run of this name has ended.",
        {JSON: ref("ScenarioRun")},
        WRITES,
        body=RUN_BODY.schema(),
        statuses=(200, 202),
        headers={"location": text()},
        detail="Send either `scenario`, the name of a shipped one, or `yaml` with the `files` that "
        "it names. Agents belong to the key's tenant.",
    ),
    Described(
        "GET",
        PATH,
        "scenarios",
        "The tenant's runs, and the shipped scenarios.",
        {JSON: listing(ref("ScenarioRun"), shipped=array(answer(name=text(), title=text())))},
        TENANTS,
    ),
    Described(
        "GET",
        f"{PATH}/{{run}}",
        "scenarios",
        "Returns a run's transcripts and figures, or streams its events.",
        {JSON: ref("ScenarioOutcome"), EVENTS: EVENT},
        NAMED,
        parameters=(
            _RUN,
            Parameter("stream", "query", FLAG, "Events, as with `Accept: text/event-stream`."),
            Parameter(LAST_ID_HEADER, "header", text(), "Continue after this event."),
        ),
    ),
    Described(
        "DELETE",
        f"{PATH}/{{run}}",
        "scenarios",
        "Cancels a running run; deletes one that has ended, with its files.",
        {
            JSON: answer(
                id=text(), object=one_of("scenario.run.deleted"), cancelled=FLAG, deleted=FLAG
            )
        },
        WRITES,
        parameters=(_RUN,),
    ),
)
