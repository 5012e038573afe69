"""Record: the frozen base class of the core types.

dataclasses costs 9 ms to import and typing.NamedTuple 9 ms, each as much as the guard's whole scan of /proc, so the
core types stand on these few lines instead (docs/adr/0002-start-time.md). Type checkers see a frozen dataclass.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda cls: cls


@dataclass_transform(frozen_default=True, kw_only_default=False)
class Record:
    """Fields are the class's annotations, in their order; a class attribute is the default."""

    _fields: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        cls._fields = cls._fields + tuple(name for name in cls.__annotations__ if name not in cls._fields)

    if not TYPE_CHECKING:

        def __init__(self, *args, **kwargs):
            values = self.__dict__
            values.update(zip(self._fields, args))
            values.update(kwargs)
            if len(args) + len(kwargs) != len(values) or not values.keys() <= set(self._fields):
                raise TypeError(f"{type(self).__name__} got {args!r} and {kwargs!r}, takes {self._fields}")
            for name in self._fields:
                if name not in values:
                    if not hasattr(type(self), name):
                        raise TypeError(f"{type(self).__name__} lacks {name}")
                    values[name] = getattr(type(self), name)

        def __setattr__(self, name, value):
            raise AttributeError(f"{type(self).__name__} is frozen: {name}")

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return type(self)(**{**self.__dict__, **changes})

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__[name] for name in self._fields))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={self.__dict__[name]!r}' for name in self._fields)})"
