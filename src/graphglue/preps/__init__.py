"""Preps that ship with graphglue, each beside a slow reference that its tests compare with."""

from graphglue.preps import paged_decode
from graphglue.registry import Registry

__all__ = ["paged_decode", "register_shipped"]


def register_shipped(registry: Registry) -> None:
    """Register every shipped prep under its own name, with its default options."""
    paged_decode.register(registry)
