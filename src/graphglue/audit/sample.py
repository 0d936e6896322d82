"""Samples: what is kept of a sampled step until its verdict is there, and what the verdict says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphglue.audit.bits import Shape, read_parting
from graphglue.audit.twin import Compared
from graphglue.core.buckets import Bucket
from graphglue.core.differences import spell_element, spell_step
from graphglue.core.keys import Key
from graphglue.device.base import ReadEvent


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Say where a sampled step parts from its twin.

    Attributes:
        key, raw: the step.
        prep: whose metadata differs; None where the fill is wrong.
        leaf: the leaf, or the slot.
        row: the first differing row; None for what has no rows.
        text: all of it in words.
    """

    key: Key
    raw: Bucket
    prep: str | None
    leaf: str
    row: int | None
    text: str

    def plain(self) -> dict[str, Any]:
        """Give it JSON-ready."""
        key = {"mode": self.key.mode.value, "bucket": list(self.key.bucket), "variant": repr(self.key.variant)}
        return {**key, "raw": list(self.raw), "prep": self.prep, "leaf": self.leaf, "row": self.row, "text": self.text}


@dataclass(slots=True)
class Sample:
    """A sampled step whose verdict nobody has read: names and extents, and the bytes that are on their way."""

    key: Key
    raw: Bucket
    groups: list[list[tuple[Compared, Shape]]]
    records: torch.Tensor | None
    event: ReadEvent
    broken: list[tuple[str, str]]
    failures: list[str]

    def mismatches(self) -> list[Mismatch]:
        """Read the verdict, which is there: the first difference of the slots, or else of each prep.

        What preps make of wrong slots says nothing of them.
        """
        found: list[Mismatch] = []
        for number, group in enumerate(self.groups):
            assert self.records is not None
            parting = read_parting(self.records[number], [shape for _, shape in group])
            if parting is None:
                continue
            one = group[parting.position][0]
            row = parting.index[0] if parting.index and one.has_rows else None
            text = spell_element(str(one), row, parting.index, one.extent, parting.seen, parting.expected)
            found.append(Mismatch(self.key, self.raw, one.prep, one.name, row, self._spell(text)))
            if one.prep is None:
                return found
        return found + [self._broken(prep, how) for prep, how in self.broken]

    def _broken(self, prep: str, how: str) -> Mismatch:
        return Mismatch(self.key, self.raw, prep, "", None, self._spell(f"prep {prep!r}, {how}"))

    def _spell(self, text: str) -> str:
        return f"a glued step differs from its eager twin, {spell_step(self.key, self.raw)}: {text}"

    def verdict(self, mismatches: Sequence[Mismatch]) -> str:
        """Name what became of the sample."""
        return "mismatched" if mismatches else "failed" if self.failures else "passed"
