"""State that changes on one event loop only: declared by a decorator, asserted in debug runs.

A node's tables need no locks, because only its event loop changes them; threads report their
results to the loop. Tests and the simulation turn the assertion on; elsewhere it costs the check of
a flag.
"""

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner")


class _Debug:
    is_on = False


_homes: WeakKeyDictionary[object, AbstractEventLoop] = WeakKeyDictionary()


def assert_one_loop() -> None:
    """Turn the assertion on in this process."""
    _Debug.is_on = True


def on_its_loop(
    method: Callable[Concatenate[Owner, P], T],
) -> Callable[Concatenate[Owner, P], T]:
    """Require that a method is called on its object's event loop.

    That is the loop on which such a method was first called; code that builds the object before any
    loop runs may call them, too.
    """

    @wraps(method)
    def checked(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if _Debug.is_on:
            check(self)
        return method(self, *args, **kwargs)

    return checked


def check(owner: object) -> None:
    """Assert that this is the object's event loop, or make it so."""
    try:
        here: AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    home = _homes.get(owner)
    if home is None and here is not None:
        _homes[owner] = here
        return
    assert home is here, f"{type(owner).__name__} is changed off its event loop"


def of_one_loop(cls: type[T]) -> type[T]:
    """Require that a class's attributes are set on each object's event loop."""

    def set_checked(self: object, name: str, value: object) -> None:
        if _Debug.is_on:
            check(self)
        object.__setattr__(self, name, value)

    cls.__setattr__ = set_checked  # type: ignore[method-assign]
    return cls
