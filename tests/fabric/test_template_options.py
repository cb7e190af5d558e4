"""Options of a chat template that operators set."""

import pytest

from fabric.errors import RejectedError
from fabric.settings import parse_settings


def test_operator_may_set_template_options_only():
    options = {"enable_thinking": False}
    assert parse_settings({"node": {"template_options": options}}).node.template_options == options
    with pytest.raises(RejectedError, match=r"template_options\.tools: it belongs to the node"):
        parse_settings({"node": {"template_options": {"tools": []}}})
