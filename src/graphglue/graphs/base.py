"""What a recorder is: the one protocol that the CPU tape and CUDA graphs both keep.

A recorder turns a callable into something that can be replayed. What both promise, and what
``tests/unit/graphs/recorder_contract.py`` holds both to:

- ``record`` executes none of the callable's device work: a captured write does not happen.
- ``replay`` re-runs the recorded device work on the same addresses and runs no Python of the callable.
- Python numbers stay as they were while recording; a tensor bound to a name later is not seen.
- Reading a tensor on the host, a shape that depends on contents, and an upload of a host
  temporary are refused with a ``CaptureError`` that names the operation, the file and the line.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Recording(Protocol):
    """One recorded callable. It keeps alive all memory that its replays touch."""

    @property
    def outputs(self) -> Any:
        """What the callable returned: tensors at addresses that never change, not computed yet."""

    @property
    def num_bytes(self) -> int:
        """Memory in bytes that this recording added: outputs and intermediates."""

    def computes(self, tensor: torch.Tensor) -> bool | None:
        """Tell whether recorded work writes the memory of a tensor; None where nobody looked."""

    def replay(self) -> None:
        """Run the recorded work on the caller's current stream. Sync: none."""

    def close(self) -> None:
        """Drop the recorded work and its memory. Calling it twice is fine."""


class Recorder(Protocol):
    """Records callables on one device."""

    @property
    def device(self) -> torch.device:
        """The device whose work is recorded."""

    def session(self) -> AbstractContextManager[None]:
        """Enclose warm-ups and recordings.

        Inside, the recorder's own stream is current, and garbage collection is held back. The
        caller's stream waits for the session's work when it ends. Sync: none.
        """

    def finish(self) -> None:
        """Wait until all work queued inside the session so far has finished. Sync: the device."""

    def record(self, run: Callable[[], Any], *, strict: bool = True) -> Recording:
        """Record ``run``, which takes no arguments and returns a tree of tensors.

        Args:
            run: the callable; it has run before with the same shapes, for real.
            strict: also refuse what the device would let pass though replays would be wrong
                (an upload from memory that is gone by then). Off for callables whose inside is
                compiled, because the check would switch compilation off.

        Raises:
            CaptureError: the callable did something that cannot be replayed, or raised. The
                stream, the memory pool and other recordings stay usable.
        """
