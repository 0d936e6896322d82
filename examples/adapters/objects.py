"""Metadata objects of engines as trees, and back: a graph's results are tensors, and an object is a class as well.

A backend may make objects of several classes, one for decode and one for prefill, or one inside another. Which class it
was is a value among the fields, so that each step is installed as what its own prep made, whatever ran in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

CLASS = "class"  # a keyword, so no field is called that


class Objects:
    """Take dataclass objects apart, and put them together again."""

    def __init__(self) -> None:
        self._types: dict[str, type] = {}

    def apart(self, made: Any) -> Any:
        """Give an object's class and fields as a dict, those of objects inside it too; anything else as it is."""
        if not is_dataclass(made) or isinstance(made, type):
            return made
        kind = type(made)
        name = f"{kind.__module__}.{kind.__qualname__}"
        self._types[name] = kind
        return {CLASS: name, **{field.name: self.apart(getattr(made, field.name)) for field in fields(made)}}

    def together(self, tree: Any) -> Any:
        """Give the object of a dict that ``apart`` made. No ``__init__`` runs again: it may compute, or wait."""
        if not isinstance(tree, Mapping) or CLASS not in tree:
            return tree
        kind = self._types[tree[CLASS]]
        made = object.__new__(kind)
        for name, value in tree.items():
            if name != CLASS:
                object.__setattr__(made, name, self.together(value))  # frozen ones too
        return made
