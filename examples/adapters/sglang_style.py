"""An adapter for engines whose attention backends install their metadata on themselves, as in SGLang.

There a backend's ``init_forward_metadata_out_graph(forward_batch)`` builds a metadata object before each step and
assigns it to ``backend.forward_metadata``, where the layers find it. A replayed graph runs none of that Python, so
after a prefill the attribute would still hold the prefill's object. The adapter makes three things of a backend:

    prep      calls the backend over the static slots, gives the fields of what it made, and leaves the attribute alone
    publish   installs an object made of a step's metadata, on every replay, whatever its route
    forward   installs the same for as long as the model runs, because a capture publishes nothing

Nothing else ever assigns the attribute, so it never points to what a capture, an audit or a shadow twin made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from adapters.objects import Objects

import graphglue as gg


class BackendAdapter:
    """Glue one attention backend, or a hybrid one with its children.

    Args:
        backend: has ``init_forward_metadata_out_graph(forward_batch)``.
        leaves: name -> backend that carries a ``forward_metadata`` of its own; the backend itself by default, whose
            fields then need no name. An object is a dataclass of tensors, plain values and such objects, and may
            be of another class in each mode.
        renamed: field of the forward batch -> slot, where the names differ.
    """

    def __init__(
        self, backend: Any, leaves: Mapping[str, Any] | None = None, renamed: Mapping[str, str] | None = None
    ) -> None:
        self.backend, self._renamed = backend, dict(renamed or {})
        self._leaves: Mapping[str, Any] = leaves or {"": backend}
        self._objects = Objects()

    def register(self, registry: gg.Registry, contract: gg.PrepContract) -> str:
        """Register the backend under its contract; give the name for ``Runner(prep=)``."""
        registry.register(contract, publish=self.publish)(self.prep)
        return contract.name

    def prep(self, view: gg.View) -> dict[str, Any]:
        """Build metadata over the static slots. Capturable if the backend's own method is."""
        with self._kept():
            self.backend.init_forward_metadata_out_graph(self.batch_of(view))
            made = {name: self._objects.apart(leaf.forward_metadata) for name, leaf in self._leaves.items()}
        return made.get("", made)

    def publish(self, metadata: Mapping[str, Any]) -> None:
        """Install a step's metadata. Sync: none."""
        parts = {"": metadata} if "" in self._leaves else metadata
        for name, leaf in self._leaves.items():
            leaf.forward_metadata = self._objects.together(parts[name])

    def forward(self, model: Callable[[SimpleNamespace], Any]) -> Callable[[gg.View, Any], Any]:
        """Give the forward for ``Runner(forward=)`` of a model that takes a forward batch and asks the backend."""

        def run(view: gg.View, metadata: Any) -> Any:
            with self._kept():
                self.publish(metadata)
                return model(self.batch_of(view))

        return run

    def batch_of(self, view: gg.View) -> SimpleNamespace:
        """Show the slots as a padded forward batch: no real count, and no length on the host."""
        batch = {name: view[name] for name in view}
        batch.update({field: view[slot] for field, slot in self._renamed.items() if slot in view})
        return SimpleNamespace(
            **batch,
            batch_size=view.bucket.requests,
            forward_mode=view.mode.value,
            req_to_token_pool=SimpleNamespace(**{name: view.tables[name] for name in view.tables}),
            seq_lens_cpu=None,
            seq_lens_sum=None,
        )

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Put back what the backends pointed to, whatever happens inside."""
        before = {name: getattr(leaf, "forward_metadata", None) for name, leaf in self._leaves.items()}
        try:
            yield
        finally:
            for name, leaf in self._leaves.items():
                leaf.forward_metadata = before[name]
