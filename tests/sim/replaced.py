"""Replacement of a part of the product while a fault is planted."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a function or an attribute for a block of code.

    A function must accept the arguments of the one that it replaces: otherwise lives would find
    the plant by its TypeError, whatever the fault is.
    """
    original = getattr(owner, name)
    if inspect.isfunction(original) and inspect.isfunction(value):
        _check_arguments(original, value)
    with mock.patch.object(owner, name, value):
        yield


def _check_arguments(original: Any, value: Any) -> None:
    positional, named = [], {}
    for name, parameter in inspect.signature(original).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(name)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = name
    try:
        inspect.signature(value).bind(*positional, **named)
    except TypeError as error:
        message = f"{value.__qualname__} cannot be called as {original.__qualname__}: {error}"
        raise AssertionError(message) from None
