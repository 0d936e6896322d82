"""The exceptions graphglue raises.

A message says what happened, what was seen against what was expected, where, and what to do.
A call that raises one of these before its launch has written nothing.
"""

from __future__ import annotations


class GraphGlueError(Exception):
    """The root of every error graphglue raises by itself."""


class ContractError(GraphGlueError):
    """A declaration is wrong, or code did not keep what it declared."""


class BindError(GraphGlueError, ValueError):
    """A batch does not fit the slots: a name, dtype, extent, device or stride is off."""


class CapacityError(BindError):
    """A batch exceeds the ladder or a slot, and no forward exists that could run it eagerly."""


class CaptureError(GraphGlueError):
    """A callable could not be recorded, or capture was asked for at the wrong time."""


class StaleTableError(GraphGlueError):
    """A table moved, or changed its geometry, after graphs that read it were captured."""


class DivergenceError(GraphGlueError):
    """A glued replay differs from its eager twin."""


class RankDisagreementError(GraphGlueError):
    """Ranks of one group hold facts that no common plan covers."""


class ClosedError(GraphGlueError):
    """The object was closed and can not be used any more."""


class ConfigError(GraphGlueError):
    """A plain value of the configuration, the ladder or a slot is not usable."""


class SegmentError(GraphGlueError):
    """A break raised while a segmented recording was replayed."""
