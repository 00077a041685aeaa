"""Immutable dataclasses that are pytrees: the base of all states."""

import dataclasses
from typing import Any, Self, dataclass_transform

import jax


def static_field(**options: Any) -> Any:
    """A field that is part of the structure and not of the leaves: hashable, and another value makes another program."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(static_field,))
class Struct:
    """Base of frozen dataclasses whose fields are children of a pytree, except static ones.

    Like `flax.struct.PyTreeNode`, whose package takes a quarter of a second to import.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, as `dataclasses.replace` makes it, in a tenth of the time.

        Raises `TypeError` for a field that there is not.
        """
        if unknown := changes.keys() - self.__dict__.keys():
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, **changes)
        return copy
