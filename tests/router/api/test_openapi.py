"""GET /openapi.json describes every route's requests and answers, and nothing else.

All tests of the router check responses against the document (`tests.support.documented`);
tests/e2e/test_openapi_cases.py does so with random requests.
"""

import re
from collections.abc import Iterator

import pytest
from jsonschema import Draft202012Validator

from tests.router.rig import rig
from tests.support.documented import DOCUMENT, document_mismatch, template


def schemas(value) -> Iterator[dict]:
    if isinstance(value, dict):
        if "schema" in value and isinstance(value["schema"], dict):
            yield value["schema"]
        for each in value.values():
            yield from schemas(each)
    elif isinstance(value, list):
        for each in value:
            yield from schemas(each)


@pytest.mark.anyio
async def test_document_is_served_and_covers_every_route():
    async with rig("a") as fabric:
        served = await fabric.http().get("/openapi.json")
        routes = {
            (method, template(route))
            for route in fabric.app.routes
            for method in route.methods
            if method != "HEAD" or "GET" not in route.methods
        }
    documented = {(m.upper(), path) for path, each in DOCUMENT["paths"].items() for m in each}

    assert served.json() == DOCUMENT
    assert documented == routes


def test_schemas_are_valid_and_all_used():
    components = DOCUMENT["components"]["schemas"]
    for schema in [*schemas(DOCUMENT["paths"]), *components.values()]:
        Draft202012Validator.check_schema(schema)
    named = set(re.findall(r"#/components/schemas/(\w+)", str(DOCUMENT)))

    assert named == set(components) - {name for name in components if name not in named}
    assert set(components) <= named, "each schema is used"


def test_operations_have_unique_ids_and_path_parameters():
    operations = [(p, o) for p, each in DOCUMENT["paths"].items() for o in each.values()]
    names = [operation["operationId"] for _, operation in operations]

    assert len(set(names)) == len(names)
    for path, operation in operations:
        placed = [p["name"] for p in operation.get("parameters", []) if p["in"] == "path"]
        assert sorted(placed) == sorted(re.findall(r"\{(\w+)\}", path)), path


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("/v1/agents/mira/resume", {"node", "replace"}),
        ("/v1/responses/x", {"stream"}),
        ("/v1/scenarios/x", {"stream"}),
    ],
)
async def test_document_names_every_query_parameter(path, read):
    found = [p for p in DOCUMENT["paths"] if re.fullmatch(re.sub(r"\{\w+\}", r"\\w+", p), path)]
    operation = next(iter(DOCUMENT["paths"][found[0]].values()))

    assert {p["name"] for p in operation["parameters"] if p["in"] == "query"} == read


def test_undocumented_response_is_detected():
    models, chats = "/v1/models", "/v1/chat/completions"
    error = b'{"error": {"message": "m", "type": "server_error", "param": null, "code": "c"}}'
    cases = [
        (("GET", models, 401, "application/json", error), None),
        (("GET", models, 418, "application/json", error), "answers 418"),
        (("GET", models, 401, "application/json", b'{"message": "m"}'), "is not valid"),
        (("GET", models, 401, "text/plain", b"no"), "as text/plain"),
        (("GET", models, 200, "application/json", b'{"object": "list"}'), "is not valid"),
        (("PUT", models, 200, "application/json", b"{}"), "no operation"),
        (("POST", chats, 200, "text/event-stream", b"data: x"), None),
    ]
    for case, expected in cases:
        found = document_mismatch(*case)
        assert (expected is None and found is None) or expected in found, (case, found)
