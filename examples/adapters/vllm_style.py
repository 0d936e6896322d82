"""An adapter for engines with metadata builders and a forward context, as in vLLM.

There a builder per KV group turns common metadata into its own, in persistent buffers, says by ``cudagraph_support``
for which batches its graphs are right, and a dispatcher picks NONE, PIECEWISE or FULL for each batch. The layers find
their metadata by layer name in the running forward context. Here:

    contract_of   reads the contract off ``cudagraph_support``
    prep          calls ``build`` over the static slots; host copies of lengths are refused by name
    publish       puts a step's metadata into the forward context, for the builder's layers, on every replay
    forward       does the same for as long as the model runs, because a capture publishes nothing
    Dispatcher    one runner for uniform decode and one for the rest, and the mode of each batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from adapters.objects import Objects

import graphglue as gg

# What a builder's graphs are right for -> what its contract says.
SUPPORT: Mapping[str, Mapping[str, Any]] = {
    "NEVER": {"modes": {gg.Mode.DECODE}, "host_free": False},
    "UNIFORM_SINGLE_TOKEN_DECODE": {"modes": {gg.Mode.DECODE}},
    "UNIFORM_BATCH": {"modes": {gg.Mode.DECODE, gg.Mode.VERIFY}},
    "ALWAYS": {"modes": {gg.Mode.DECODE, gg.Mode.VERIFY}, "ragged": True},
}


def contract_of(builder: Any, name: str, **more: Any) -> gg.PrepContract:
    """Declare a builder: ``cudagraph_support`` says the modes, ``more`` the reads, tables, outputs and writes."""
    return gg.PrepContract(name=name, **{**SUPPORT[builder.cudagraph_support.name], **more})


class OnHost:
    """Stand in for a host copy of a length: a graph would freeze what it holds at capture."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, asked: str) -> Any:
        raise gg.ContractError(
            f"the builder reads {self._name}.{asked} on the host, which one graph for all steps can not; let it read "
            "the device tensor, compute it in plan=, or declare cudagraph_support NEVER and build eagerly"
        )

    def __getitem__(self, index: Any) -> Any:
        return self.__getattr__(f"[{index}]")


class BuilderAdapter:
    """Glue one metadata builder.

    Args:
        builder: has ``build(common_prefix_len, common)`` and ``cudagraph_support``; its metadata is a dataclass of
            tensors, plain values and such objects.
        layers: the layers that read its metadata.
        context: the engine's forward context, with a dict ``attn_metadata`` by layer. An engine that makes a new one
            for each step hands in an object whose attribute is that of the current one.
        common: builds the engine's common metadata from keywords.
        max_model_len: the longest context, which stands for the longest of every step.
    """

    def __init__(
        self, builder: Any, layers: Sequence[str], context: Any, common: Callable[..., Any], max_model_len: int
    ) -> None:
        self.builder, self.layers, self.context = builder, tuple(layers), context
        self._common, self._max_model_len = common, max_model_len
        self._objects = Objects()

    def register(self, registry: gg.Registry, contract: gg.PrepContract) -> str:
        """Register the builder under its contract; give the name for ``Runner(prep=)``."""
        registry.register(contract, publish=self.publish)(self.prep)
        return contract.name

    def prep(self, view: gg.View) -> dict[str, Any]:
        """Build metadata over the static slots. Capturable if ``build`` is."""
        return self._objects.apart(self.builder.build(0, self._common(**self._common_fields(view))))

    def publish(self, metadata: Mapping[str, Any]) -> None:
        """Install a step's metadata for the builder's layers. Sync: none."""
        made = self._objects.together(metadata)
        self.context.attn_metadata = {**(self.context.attn_metadata or {}), **dict.fromkeys(self.layers, made)}

    def _common_fields(self, view: gg.View) -> dict[str, Any]:
        """Describe a step that fills its bucket: every count is the bucket's, and lengths are on the device only."""
        bucket = view.bucket
        return {
            "query_start_loc": view.query_start_loc,
            "query_start_loc_cpu": OnHost("query_start_loc_cpu"),
            "seq_lens": view.seq_lens,
            "seq_lens_cpu": OnHost("seq_lens_cpu"),
            "num_reqs": bucket.requests,
            "num_actual_tokens": bucket.tokens,
            "max_query_len": bucket.row_tokens or bucket.tokens,
            "max_seq_len": self._max_model_len,
            "block_table_tensor": view.block_table,
            "slot_mapping": view.slot_mapping,
        }


def forward_of(
    adapters: Mapping[str, BuilderAdapter] | BuilderAdapter, model: Callable[[gg.View], Any]
) -> Callable[[gg.View, Any], Any]:
    """Give the forward for ``Runner(forward=)`` of a model whose layers ask the forward context.

    Args:
        adapters: one, or several by prep name where the runner has a list of preps.
        model: takes the view.
    """

    def run(view: gg.View, metadata: Any) -> Any:
        named = {"": adapters} if isinstance(adapters, BuilderAdapter) else adapters
        with kept(next(iter(named.values())).context):
            for name, adapter in named.items():
                adapter.publish(metadata[name] if name else metadata)
            return model(view)

    return run


@contextmanager
def kept(context: Any) -> Iterator[None]:
    """Put back what the forward context held, whatever happens inside."""
    before = context.attn_metadata
    try:
        yield
    finally:
        context.attn_metadata = before


class Dispatcher:
    """Pick the runner and the mode of each batch: FULL where one graph serves it, PIECEWISE in segments, else NONE.

    Args:
        decode: the runner for uniform decode.
        mixed: the runner for the rest, in segments (EXTEND); None where that is eager.
    """

    def __init__(self, decode: gg.Runner, mixed: gg.Runner | None = None) -> None:
        self.decode, self.mixed = decode, mixed

    def mode(self, batch: gg.Batch) -> str:
        """Say the cudagraph mode of a batch. Writes nothing. Sync: none."""
        runner = self.runner_of(batch)
        if runner is None or not runner.can_replay(batch):
            return "NONE"
        return "PIECEWISE" if runner is self.mixed else "FULL"

    def replay(self, batch: gg.Batch) -> gg.Step:
        """Run a batch on its runner, whatever its mode is."""
        runner = self.runner_of(batch)
        if runner is None:
            raise gg.ConfigError(f"no runner serves {batch.mode.value} batches; run it by the engine's own path")
        return runner.replay(batch)

    def runner_of(self, batch: gg.Batch) -> gg.Runner | None:
        """Give the runner that counts as the batch does."""
        return self.mixed if batch.mode.counts_tokens else self.decode
