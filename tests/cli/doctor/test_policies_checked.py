"""`macfabric config check` tries the policies of a cluster file."""

import copy

import pytest

from router.cli.doctor.config_check import own_findings
from tests.cli.doctor.test_config_check import ROOT, SHIPPED


@pytest.mark.parametrize(
    ("policy", "level", "where", "why"),
    [
        ({"use": "truncate"}, "error", "[1].use", "neither module:Class nor one of"),
        ({"use": "strip_thinking", "options": {"keep": -1}}, "error", "[1].options", "keep must"),
        ({"use": "only.there:Policy"}, "warning", "[1].use", "cannot import"),
        ({"use": "tests.router.policies.operators_own:Shouting"}, None, "", ""),
    ],
)
def test_invalid_policy_is_found_at_its_place(policy, level, where, why):
    config = copy.deepcopy(SHIPPED)
    config["metadata"]["macfabric"]["router"]["policies"] = [{"use": "keep_all"}, policy]
    place = "metadata.macfabric.router.policies"
    found = [each for each in own_findings(config, ROOT) if each.where.startswith(place)]

    assert [(each.level, each.where) for each in found] == (
        [(level, place + where)] if level else []
    )
    assert all(why in each.message for each in found)
