"""Names that documents may use: commands, settings, routes, events, metrics, codes, JSON keys."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import router.events
from fabric.control.node_calls import AgentView, NodeView
from fabric.retention import TenantShare
from fabric.settings import DATES_OPTION, FabricSettings
from fabric.tenant_settings import TenantLimits
from router.app import describe_api
from router.telemetry import Telemetry
from tests.support.error_codes import error_codes

PREFIX = "macfabric_"
BY_TENANT = {"tenants": TenantShare, "tenant_limits": TenantLimits}
PARAMETER = re.compile(r"\{\w+\}")


def setting_names(section: Any) -> Iterator[str]:
    """List a section's keys; keys of subsections are prefixed with the subsection's name."""
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from (f"{field.name}.{name}" for name in setting_names(value))
        elif field.name in BY_TENANT:
            names = setting_names(BY_TENANT[field.name]())
            yield from (f"{field.name}.NAME.{name}" for name in names)
        else:
            yield field.name


@cache
def settings() -> frozenset[str]:
    """Return all settings, prefixed with `node.` or `router.` where they belong to a section."""
    return frozenset(setting_names(FabricSettings()))


@cache
def sections() -> frozenset[str]:
    """Return the names of all sections, such as `node.tenants` and `router.tls`."""
    parts = (name.split(".") for name in settings())
    return frozenset(".".join(part[:n]) for part in parts for n in range(1, len(part)))


@cache
def routes() -> frozenset[tuple[str, str]]:
    """Return (method, path) of every route; test_openapi holds the document to the application."""
    paths = describe_api()["paths"]
    return frozenset((method.upper(), path) for path, each in paths.items() for method in each)


@cache
def event_classes() -> dict[str, Any]:
    """Return the class of every event of the fleet by its name."""
    found = vars(router.events).values()
    classes = [each for each in found if isinstance(each, type) and is_dataclass(each)]
    return {each.name: each for each in classes if isinstance(vars(each).get("name"), str)}


@cache
def metrics() -> frozenset[str]:
    """Return the names of all metrics as Prometheus shows them, without buckets and sums."""
    telemetry = Telemetry()
    telemetry._node_gauges.membership = SimpleNamespace(members=())
    families = telemetry.registry.collect()
    return frozenset(f"{f.name}_total" if f.type == "counter" else f.name for f in families)


@cache
def json_keys() -> frozenset[str]:
    """Return the keys of all bodies and answers."""
    views = (field.name for view in (AgentView, NodeView) for field in fields(view))
    return frozenset({*_properties(describe_api()), *views})


def _properties(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        inner = schema.get("properties")
        yield from inner if isinstance(inner, dict) else ()
        for value in schema.values():
            yield from _properties(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _properties(value)


@cache
def words() -> frozenset[str]:
    """Return every name of several words that a document may use in code."""
    dotted = {part for name in settings() for part in name.split(".")}
    event_keys = {f.name for each in event_classes().values() for f in fields(each)}
    return frozenset({DATES_OPTION, *dotted, *event_keys, *error_codes(), *metrics(), *json_keys()})
