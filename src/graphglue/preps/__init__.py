"""Preps that ship with graphglue; ``reference``, or the prep's own module, has a slow one that tests compare with."""

from graphglue.preps import causal, compression, draft, paged_decode, split_kv, top_up
from graphglue.registry import Registry

__all__ = ["causal", "compression", "draft", "paged_decode", "register_shipped", "split_kv", "top_up"]


def register_shipped(registry: Registry) -> None:
    """Register every shipped prep under its own name, with its default options."""
    for room in (paged_decode, causal, draft, compression, top_up, split_kv):
        room.register(registry)
