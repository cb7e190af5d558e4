"""Nemotron Nano 2: a JSON list of calls between marks."""

from node.dialect.formats import Family, sign
from node.dialect.json_calls import json_list_format

FAMILY = Family(
    calls=(json_list_format("nemotron", "<TOOLCALL>", "</TOOLCALL>", sign("<TOOLCALL>")),)
)
