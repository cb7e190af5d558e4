"""Policies as an operator lists them: built-in ones, and classes of modules of the operator's."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NoReturn

from fabric.errors import RejectedError
from fabric.settings import PolicySettings
from router.policies.built_in import BUILT_IN, create_built_in
from router.policies.foreign_calls import ForeignCalls
from router.policies.policy import EditPolicy

_WHERE = "macfabric.router.policies"


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy by the name that requests and answers have for it."""

    name: str
    policy: EditPolicy
    by_default: bool = True
    calls: ForeignCalls[Any] | None = field(default=None, repr=False)  # None: one of ours


def configured_policies(settings: Sequence[PolicySettings]) -> Iterator[NamedPolicy]:
    """Make all that are listed; raise RejectedError that says which cannot be, and why."""
    for at, each in enumerate(settings):
        where = f"{_WHERE}[{at}]"
        if ":" in each.use:
            policy = _loaded(each, where)
            yield NamedPolicy(each.known_as, policy, each.by_default, ForeignCalls())
        elif each.use in BUILT_IN:
            policy = create_built_in(each.use, each.options, f"{where}.options")
            yield NamedPolicy(each.known_as, policy, each.by_default)
        else:
            known = ", ".join(BUILT_IN)
            _refuse(f"{where}.use", f"{each.use!r} is neither module:Class nor one of {known}")


def _loaded(each: PolicySettings, where: str) -> EditPolicy:
    module, _, name = each.use.partition(":")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # noqa: BLE001 - a module may raise anything while it is imported
        told = f"cannot import {each.use!r}: {type(error).__name__}: {error}"
        _refuse(f"{where}.use", told)
    if not (inspect.isclass(found) and issubclass(found, EditPolicy)):
        _refuse(f"{where}.use", f"{each.use!r} is no subclass of router.policies.policy.EditPolicy")
    if inspect.isabstract(found):
        _refuse(f"{where}.use", f"{each.use!r} has no transform")
    try:
        made: EditPolicy = found(**each.options)
    except Exception as error:  # noqa: BLE001 - likewise
        told = f"{each.use!r} does not take them: {type(error).__name__}: {error}"
        _refuse(f"{where}.options", told)
    return made


def _refuse(where: str, why: str) -> NoReturn:
    message = f"{where}: {why}"
    raise RejectedError(message, code="invalid_settings")
