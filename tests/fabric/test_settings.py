"""Settings files: all errors are reported at once and explained; amounts take units."""

import pytest

from fabric.codec import pack, to_plain, unpack
from fabric.limits import GIB, MIB
from fabric.settings import FabricSettings, NodeSettings, inspect_settings, parse_settings
from fabric.settings_reader import SettingsError
from fabric.units import parse_bytes, parse_seconds

BYTES = {
    "8GiB": 8 * GIB,
    "8 GiB": 8 * GIB,
    "8gib": 8 * GIB,
    "1.5 MiB": 3 * MIB // 2,
    "500 MB": 500_000_000,
    "16MiB/s": 16 * MIB,
    "7 B": 7,
    "1TiB": 1024 * GIB,
}
NO_BYTES = ["", "8", "8G", "GiB", "-8GiB", "8 GiB GiB", "8GiBs", "1e3 MB", "0x8GiB", "٨GiB", "8ibb"]
SECONDS = {
    "90s": 90,
    "10m": 600,
    "10 min": 600,
    "24h": 86_400,
    "1.5h": 5_400,
    "1h30m": 5_400,
    "7d": 604_800,
}
NO_SECONDS = ["", "10", "m", "-1h", "1h m", "10 minutes", "1h30"]
# Setting, written value, and the error's text beside the setting's name.
WRONG = [
    ("node.hot_bytes", "8G", "a number of bytes, such as 8589934592 or 8GiB, not '8G'"),
    ("node.hot_bytes", 8.5, "a number of bytes"),
    ("node.hot_bytes", True, "not True"),
    ("node.disk_ttl_s", "a day", "a number of seconds, such as 86400 or 24h, not 'a day'"),
    ("node.hot_bytes", 0, "must be positive, or auto"),
    ("node.disk_bytes", "auto", "a number of bytes"),
    ("node.tenants.a.floor", "auto", "must be a number, not 'auto'"),
    ("node.active_max", "32", "a whole number, not '32'"),
    ("node.exact_chunks", "yes", "true or false, not 'yes'"),
    ("node.chat_template", 7, "must be text, not a number: put it in quotes"),
    ("node.kv_bits", 4, "must be a map of `key: value`, not a number"),
    ("node.hot_byts", 1, "did you mean hot_bytes?"),
    ("node.colour", 1, "is unknown; keys are"),
    ("router.allowed_hosts", "studio", "must be a list such as [a, b], not text"),
    ("router.host", "http://0.0.0.0", "without scheme"),
    ("router.host", "0.0.0.0:8000", "without scheme and port"),
    ("router.host", "", "an address or a name"),
    ("router.tls.certificate", "/a.pem", ""),
]


def section(setting: str, value: object) -> dict:
    for name in reversed(setting.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("text", BYTES)
def test_byte_amounts_take_units(text):
    assert parse_bytes(text) == BYTES[text]
    assert parse_settings({"node": {"hot_bytes": text}}).node.hot_bytes == BYTES[text]


def test_hot_bytes_may_be_auto():
    for section in ({}, {"node": {"hot_bytes": "auto"}}, {"node": {"hot_bytes": None}}):
        settings = parse_settings(section)
        assert settings.node.hot_bytes is None
        assert unpack(NodeSettings, pack(settings.node)) == settings.node


@pytest.mark.parametrize("text", SECONDS)
def test_durations_take_units(text):
    assert parse_seconds(text) == SECONDS[text]
    assert parse_settings({"node": {"disk_ttl_s": text}}).node.disk_ttl_s == SECONDS[text]


@pytest.mark.parametrize("text", NO_BYTES)
def test_invalid_byte_amounts_are_rejected(text):
    assert parse_bytes(text) is None


@pytest.mark.parametrize("text", NO_SECONDS)
def test_invalid_durations_are_rejected(text):
    assert parse_seconds(text) is None


def test_every_byte_and_duration_setting_takes_units():
    node = dict.fromkeys(("hot_bytes", "disk_bytes", "popular_bytes", "scrub_bytes_per_s"), "1GiB")
    node |= dict.fromkeys(("disk_ttl_s", "scrub_every_s"), "1h")
    read = parse_settings({"node": node, "router": {"takeover_after_s": "3s"}})

    assert {getattr(read.node, name) for name in node} == {GIB, 3600.0}
    assert read.router.takeover_after_s == 3.0


@pytest.mark.parametrize(("setting", "value", "text"), WRONG, ids=lambda value: str(value)[:30])
def test_invalid_value_is_explained(setting, value, text):
    with pytest.raises(SettingsError) as error:
        parse_settings(section(setting, value))

    (problem,) = error.value.problems
    where = "router.tls" if "tls" in setting else setting
    assert problem.where == f"macfabric.{where}"
    assert text in problem.message


def test_all_errors_are_reported_at_once_and_the_rest_is_read():
    wrong = {
        "modle": "recall",
        "local_nodes": ["Node A"],
        "node": {"hot_bytes": "x", "active_max": 0, "tenants": {"a/b": {}, "c": {"quota": 2}}},
        "router": {"port": 70_000, "api_keys": {"a": "short"}, "policies": [{}], "replicas": 1},
    }
    settings, problems = inspect_settings(wrong)

    assert sorted(problem.where.removeprefix("macfabric.") for problem in problems) == [
        "local_nodes[0]", "modle", "node.active_max", "node.hot_bytes", "node.tenants.a/b",
        "node.tenants.c.quota", "router.api_keys.a", "router.policies[0].use", "router.port",
    ]  # fmt: skip
    assert settings.router.replicas == 1
    assert settings.node.hot_bytes == FabricSettings().node.hot_bytes
    with pytest.raises(SettingsError) as error:
        parse_settings(wrong)
    assert error.value.problems == problems


def test_errors_never_contain_keys():
    secret = 1234567890123456
    problems = inspect_settings({"router": {"api_keys": {"a": secret}, "operator_keys": [secret]}})[
        1
    ]

    assert len(problems) == 2
    assert str(secret) not in "".join(map(str, problems))


@pytest.mark.parametrize("value", [None, {}])
def test_missing_section_means_all_defaults(value):
    assert parse_settings(value) == FabricSettings()


@pytest.mark.parametrize("value", [[], "x", 3])
def test_section_that_is_not_a_map_is_rejected(value):
    with pytest.raises(SettingsError, match="must be a map"):
        parse_settings(value)


def test_settings_round_trip():
    settings = parse_settings(
        {"node": {"hot_bytes": "1GiB", "disk_ttl_s": "1h", "tenants": {"a": {}}}}
    )

    assert parse_settings(to_plain(settings)) == settings


@pytest.mark.parametrize("name", ["thinking_budget", "effort_budgets.low"])
def test_thinking_budget_is_a_token_count_or_unlimited(name):
    def node(tokens):
        first, _, rest = name.partition(".")
        return {"node": {first: {rest: tokens} if rest else tokens}}

    assert parse_settings(node(0)).node != parse_settings(node(-1)).node
    with pytest.raises(SettingsError) as caught:
        parse_settings(node(-2))
    assert f"node.{name}" in caught.value.message
