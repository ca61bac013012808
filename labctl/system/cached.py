"""A property that is computed once per object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class once(Generic[T]):  # noqa: N801 - a decorator
    """Compute a property at its first use and store it in the object, as ``functools.cached_property`` of Python 3.12.

    Earlier versions of that lock all objects of a class while one computes. Here threads that read an object's property
    at once may each compute it.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        """Compute the value and store it in the object under the property's name, which later reads find first."""
        # A descriptor without __set__ gives way to the object's dictionary: this runs once.
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
