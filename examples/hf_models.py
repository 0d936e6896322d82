"""Models of the transformers library over a cache whose rows have positions of their own; hf_llama.py serves them.

A cache layer of 20 lines writes each row where the step's metadata says, and a prep makes that metadata from one slot,
the lengths: positions, columns of the cache, attention mask. Llama sees every token; Mistral sees a window, so its prep
lays the cache out as a ring. The model's code and the cache layer are the same for both.

The library's own caches can be captured too, without a complaint, and are then wrong: StaticCache counts every call,
warm-ups included, and DynamicCache grows by binding longer tensors, which no replay does. A mask of two dimensions is
read on the host where there is no cache, which a capture refuses; one of four is taken as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

import graphglue as gg

# The library renames this argument.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
Prep = Callable[[Any], dict[str, Tensor]]


# The cache: row i of a batch is row i of the memory, and the last column is the sink of padded rows.


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer in static rows; the column that each row writes is handed in."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, columns: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True  # [rows, heads, columns, head_dim]
        self._columns = columns[:, None, None, None]  # one for each row

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token for each row, in place, and give all that is kept."""
        places = self._columns.expand_as(key_states)
        return self.keys.scatter_(2, places, key_states), self.values.scatter_(2, places, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Leave the memory as it is: it is there from the start, so that its address never changes."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Give the mask's width and offset."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Know no length: each row has its own, and positions are handed to the model."""
        return 0

    def get_max_length(self) -> int:
        """Give the columns."""
        return self.keys.shape[2]


def decode(model: Any, memory: Tensor, input_ids: Tensor, metadata: Any) -> dict[str, Tensor]:
    """Call the model's own forward on one token for each row.

    Args:
        model: of the library.
        memory: [layers, 2, rows, heads, columns, head_dim]; the first rows are those of the batch.
        input_ids: [N] int64.
        metadata: positions and cache_positions [N] int64, mask [N, 1, 1, columns] of the model's dtype.
    """
    rows = memory[:, :, : input_ids.shape[0]]
    cache = Cache(layers=[SlotLayer(keys, values, metadata["cache_positions"]) for keys, values in rows])
    logits = model(
        input_ids=input_ids[:, None],
        attention_mask=metadata["mask"],  # four dimensions: the library takes it as it is
        position_ids=metadata["positions"][:, None],
        use_cache=True,
        **{CACHE: cache},
    ).logits[:, 0]
    return {"next_token": logits.argmax(dim=-1), "logits": logits}


# The preps: what differs between a model that keeps everything and one that sees a window.


def contract_of(name: str) -> gg.PrepContract:
    """Declare a prep: it reads lengths, 0 for padded rows."""
    outputs = {"positions": "token", "cache_positions": "token", "mask": "token"}
    return gg.PrepContract(name=name, reads={"seq_lens": 0}, outputs=outputs, modes={gg.Mode.DECODE})


@dataclass(frozen=True)
class Layout:
    """How a row of the cache is laid out: columns that hold tokens, and the sink behind them."""

    width: int
    dtype: torch.dtype

    @property
    def num_columns(self) -> int:
        """All columns; a multiple of 8, which attention kernels like."""
        return -(-(self.width + 1) // 8) * 8


def causal(layout: Layout) -> Prep:
    """Make the prep of a model that sees every token, each at the column of its position."""

    def prep(view: Any) -> dict[str, Tensor]:
        lens = view.seq_lens
        positions = (lens - 1).clamp(min=0)
        return metadata_of(layout, lens, positions, columns=positions, num_seen=lens)

    return prep


def ring(layout: Layout) -> Prep:
    """Make the prep of a model that sees the newest tokens: a new one takes the column of the oldest."""

    def prep(view: Any) -> dict[str, Tensor]:
        lens = view.seq_lens
        positions = (lens - 1).clamp(min=0)
        columns, num_seen = positions % layout.width, lens.clamp(max=layout.width)
        return metadata_of(layout, lens, positions, columns, num_seen)

    return prep


def metadata_of(
    layout: Layout, lens: Tensor, positions: Tensor, columns: Tensor, num_seen: Tensor
) -> dict[str, Tensor]:
    """Let each row see its first columns; a padded row writes the sink and sees nothing else."""
    columns = torch.where(lens > 0, columns, layout.num_columns - 1)
    places = torch.arange(layout.num_columns, device=lens.device)
    seen = (places < num_seen[:, None]) | (places == columns[:, None])
    mask = torch.where(seen, 0.0, float("-inf")).to(layout.dtype)
    return {"positions": positions, "cache_positions": columns, "mask": mask[:, None, None]}


# What is served.


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of the engine around it."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    ffn: int
    vocab: int
    max_prompt: int
    max_generated: int
    window: int
    ladder: tuple[int, ...]

    @property
    def context(self) -> int:
        """The most tokens of a request."""
        return self.max_prompt + self.max_generated


SMALL = Shape(2, 64, 4, 2, 128, 256, max_prompt=40, max_generated=20, window=12, ladder=(2, 4, 8))
LARGE = Shape(
    16, 2048, 32, 8, 8192, 32000, max_prompt=300, max_generated=160, window=128, ladder=(1, 2, 4, 8, 16, 32, 64)
)


class Model:
    """A model of the library with random weights, its window if it has one, and its ordinary decoding."""

    def __init__(self, kind: str, shape: Shape, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        sizes = {
            "num_hidden_layers": shape.num_layers,
            "hidden_size": shape.hidden,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "intermediate_size": shape.ffn,
            "vocab_size": shape.vocab,
            "initializer_range": 1.5 * shape.hidden**-0.5,  # so that greedy decoding wanders
            "attn_implementation": "sdpa",
        }
        torch.manual_seed(seed)
        with device:
            if kind == "llama":
                model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=shape.context, **sizes))
            else:
                model = MistralForCausalLM(MistralConfig(sliding_window=shape.window, **sizes))
        self.shape, self.dtype, self.device = shape, dtype, device
        self.library = model.to(dtype).eval().requires_grad_(False)

    def memory(self, num_columns: int) -> Tensor:
        """Make an empty cache for the largest batch."""
        shape = self.shape
        head_dim = shape.hidden // shape.num_heads
        sizes = (shape.num_layers, 2, shape.ladder[-1], shape.num_kv_heads, num_columns, head_dim)
        return torch.zeros(sizes, dtype=self.dtype, device=self.device)

    def read(self, tokens: Sequence[int], cache: DynamicCache) -> int:
        """Read tokens with the library's ordinary cache, and sample the next one."""
        input_ids = torch.tensor([tokens], device=self.device)
        return int(self.library(input_ids=input_ids, use_cache=True, **{CACHE: cache}).logits[0, -1].argmax())

    def alone(self, prompt: Sequence[int], num_wanted: int) -> list[int]:
        """Decode one request by itself, with nothing of graphglue."""
        cache, fed, generated = DynamicCache(config=self.library.config), prompt, []
        for _ in range(num_wanted):
            generated.append(self.read(fed, cache))
            fed = generated[-1:]
        return generated
