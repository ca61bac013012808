"""A property that is computed once for each object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class once(Generic[T]):  # noqa: N801 - a decorator
    """As ``functools.cached_property`` of Python 3.12: before, all objects of a class wait for the one that is slow.

    Threads that ask an object at once may each compute it.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        # What is in the object's own dictionary counts before this descriptor, from then on.
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
