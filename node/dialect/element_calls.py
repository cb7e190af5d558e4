"""Calls whose arguments are elements named after them, with lists and objects as elements within.

A separator precedes each tag, so that a text may contain tags of its own:
<city>Paris SEP</city> SEP<tags> SEP<item>a SEP</item> SEP</tags>
"""

import re
from collections.abc import Mapping
from json import dumps, loads
from typing import Any, Final

from fabric.limits import JSON_DEPTH_MAX
from node.dialect.tag_calls import TagCallReader, TagFormat, json_value
from node.dialect.tool_schema import member_schema, tool_parameters, value_types
from node.limits import CALL_HEADER_CHARS_MAX

ITEM: Final = "item"
NAME: Final = r"[^<>\[\]\s/][^<>\[\]\s]*"  # name of an element; a separator has brackets


class ElementCallReader(TagCallReader):
    """Reader of such calls; a list or an object is read when it is whole."""

    def __init__(self, tools: list[Any] | None, tags: TagFormat) -> None:
        super().__init__(tools, tags)
        separator = re.escape(tags.after_loose_end)
        # Models may omit the separator of an end.
        self._tag = re.compile(
            rf"{separator}<(?P<close>/?)(?P<key>{NAME})>|</(?P<bare>{NAME})>(?={separator})"
        )
        self._open_keys: list[str] = []
        self._scanned_chars = 0  # scanned part of a value that is not a text

    def _start_argument(self, groups: Mapping[str, str | None]) -> None:
        super()._start_argument(groups)
        assert self._key is not None, "just set"
        self._open_keys, self._scanned_chars = [self._key], 0

    def _read_value(self) -> None:
        if self._is_text or self.is_enforced:  # grammars write lists and objects in JSON
            super()._read_value()
            return
        for tag in self._tag.finditer(self._unread, self._scanned_chars):
            self._scanned_chars = tag.end()
            if not tag["bare"] and not tag["close"]:
                self._open_keys.append(tag["key"])
                self.has_failed = len(self._open_keys) > JSON_DEPTH_MAX
                if self.has_failed:
                    return
            elif self._open_keys[-1] == (tag["bare"] or tag["key"]):
                self._open_keys.pop()
            if not self._open_keys:
                text = self._take(tag.end())[: tag.start() - tag.end()]
                self._add_arguments(dumps(self._parse(text), ensure_ascii=False))
                self._key = None
                return
        unscanned = len(self._unread) - CALL_HEADER_CHARS_MAX  # no tag is as long
        self._scanned_chars = max(self._scanned_chars, unscanned)

    def _parse(self, text: str) -> Any:
        """Return an argument's value."""
        parameters = tool_parameters(self.tools, self._name)
        assert self._key is not None, "within an argument"
        schema = member_schema(parameters, self._key, parameters)
        return _Elements(self._tag, parameters).value(text, schema)


class _Elements:
    """Parser of an element's content."""

    def __init__(self, tag: re.Pattern[str], root: Mapping[str, Any]) -> None:
        self._tag = tag
        self._root = root

    def value(self, text: str, schema: Any) -> Any:
        types = value_types(schema, self._root)
        children = list(self._children(text))
        if not children:
            return self._scalar(text, types)
        is_list = all(key == ITEM for key, _ in children) and "object" not in types
        if "array" in types or is_list:
            items = member_schema(schema, None, self._root)
            return [self.value(inner, items) for _, inner in children]
        return {
            key: self.value(inner, member_schema(schema, key, self._root))
            for key, inner in children
        }

    def _scalar(self, text: str, types: set[str]) -> Any:
        if not text.strip() and types and "string" not in types:
            return [] if "array" in types else {} if "object" in types else None
        return text if types == {"string"} else loads(json_value(text, types))

    def _children(self, text: str) -> list[tuple[str, str]]:
        """List the elements directly within a text, each with its content."""
        children: list[tuple[str, str]] = []
        open_keys: list[str] = []
        start = 0
        for tag in self._tag.finditer(text):
            if not tag["bare"] and not tag["close"]:
                open_keys.append(tag["key"])
                start = start if len(open_keys) > 1 else tag.end()
            elif open_keys and open_keys[-1] == (tag["bare"] or tag["key"]):
                key = open_keys.pop()
                if not open_keys:
                    children.append((key, text[start : tag.start()]))
        return children
