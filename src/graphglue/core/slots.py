"""Slots: named static tensors that captured graphs read, and how their tails are padded."""

from __future__ import annotations

import enum
import keyword
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from graphglue.errors import ConfigError

MAPPING_NAMES = frozenset({"keys", "values", "items", "get"})  # they would hide tensors from dict(view)
RESERVED_NAMES = MAPPING_NAMES | {"tables", "bucket", "mode", "variant", "meeting", "fresh"}
_INTEGERS = frozenset(
    {torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64}
)
_FLOATS = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)


class Axis(str, enum.Enum):
    """What the rows of a slot count."""

    REQUEST = "request"
    TOKEN = "token"
    OFFSET = "offset"  # requests + 1 rows: cumulative counts
    RANK = "rank"  # one row per rank, never padded
    FIXED = "fixed"  # no rows: the shape is `inner`, exactly


class Pad(enum.Enum):
    """Pad rules that are not a plain number."""

    REPEAT_LAST = "repeat_last"


class Computed(enum.Enum):
    """Numbers of a step that a slot may hold without anybody handing them in."""

    RAW_REQUESTS = "raw_requests"
    RAW_TOKENS = "raw_tokens"
    BUCKET_REQUESTS = "bucket_requests"
    BUCKET_TOKENS = "bucket_tokens"
    RANK_COUNTS = "rank_counts"  # the padded token count of every rank


REPEAT_LAST = Pad.REPEAT_LAST
Number = bool | int | float
PadValue = Pad | Number


def kind_of(dtype: torch.dtype) -> str:
    """Name the kind of a dtype: bool, integer, float or other."""
    if dtype == torch.bool:
        return "bool"
    if dtype in _FLOATS:
        return "float"
    return "integer" if dtype in _INTEGERS else "other"


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether every value of ``source`` is a value of ``target``, of the same kind."""
    if source == target:
        return True
    kind = kind_of(source)
    if kind != kind_of(target) or kind not in ("integer", "float"):
        return False
    if kind == "integer":
        small, large = torch.iinfo(source), torch.iinfo(target)
        return large.min <= small.min and small.max <= large.max
    if target == torch.float8_e5m2fnuz:  # finfo gives it the mantissa of another format
        return False
    # Values lie as close as eps says at any size, and down to the smallest subnormal, which is tiny * eps.
    narrow, wide = torch.finfo(source), torch.finfo(target)
    as_close = wide.eps <= narrow.eps and wide.tiny * wide.eps <= narrow.tiny * narrow.eps
    return as_close and wide.max >= narrow.max


def same_pad(one: PadValue, other: PadValue) -> bool:
    """Compare two pads by value; NaN equals NaN."""
    return one == other or (one != one and other != other)


@dataclass(frozen=True, eq=False)
class Slot:
    """Declare one static tensor that preps and forwards read.

    Args:
        name: a Python identifier; ``view.<name>`` inside a prep.
        axis: request, token, offset, rank or fixed: what its rows count.
        dtype: any bool, integer or floating dtype.
        pad: the value of the rows [raw, bucket), or ``REPEAT_LAST`` for cumulative slots. It has
            no default: a silent 0 is how padded rows came to write live memory.
        inner: the dimensions besides the rows; for axis fixed, the whole shape.
        row_dim: where the rows stand among the dimensions: 1 makes inner=(3,) a slot (3, rows).
        missing: what a batch without this slot means: an error, or all rows pad.
        capture: the value that preps see while they are recorded (worst-case lengths), or a
            callable of the row index; the pad by default.
        idle: the value of all rows of an IDLE step; the pad by default.
        index_of: the table whose rows this slot indexes; pad, idle and capture must be rows of it.
        accepts: wider source dtypes of the same kind that may be narrowed into this slot.
        valid: inclusive range of legal values, for audits and strategies; not checked per step.
        storage: an engine's own buffer to adopt; rows at least the ladder's largest bucket.
        value: computes the slot's rows from the step itself; batches must not hand it in.

    Raises:
        ConfigError: a value that does not fit the others.
    """

    name: str
    axis: Axis | str
    dtype: torch.dtype
    pad: PadValue
    inner: tuple[int, ...] = ()
    row_dim: int = 0
    missing: str = "error"
    capture: Number | Callable[[int], Number] | None = None
    idle: Number | None = None
    index_of: str | None = None
    accepts: tuple[torch.dtype, ...] = ()
    valid: tuple[Number, Number] | None = None
    storage: torch.Tensor | None = None
    value: Computed | None = None

    def __post_init__(self) -> None:
        self._check_name()
        try:
            axis = Axis(self.axis)
        except ValueError:
            raise self._fault(f"axis {self.axis!r}", "one of " + ", ".join(a.value for a in Axis)) from None
        object.__setattr__(self, "axis", axis)
        if not isinstance(self.dtype, torch.dtype) or kind_of(self.dtype) == "other":
            raise self._fault(f"dtype {self.dtype!r}", "a bool, integer or floating torch.dtype")
        object.__setattr__(self, "inner", self._checked_inner())
        object.__setattr__(self, "accepts", self._checked_accepts())
        self._check_values()
        if self.missing not in ("error", "pad"):
            raise self._fault(f"missing={self.missing!r}", "'error' or 'pad'")
        self._check_storage()

    def shape(self, rows: int) -> tuple[int, ...]:
        """Give the shape of this slot at a number of rows."""
        if self.axis is Axis.FIXED:
            return self.inner
        return self.inner[: self.row_dim] + (rows,) + self.inner[self.row_dim :]

    def rows(self, requests: int, tokens: int, num_ranks: int = 1) -> int:
        """Give the number of rows for these counts; 1 for axis fixed, whose shape has no rows.

        Args:
            requests: requests, real or padded.
            tokens: tokens, real or padded.
            num_ranks: ranks of the group.
        """
        match self.axis:
            case Axis.REQUEST:
                return requests
            case Axis.TOKEN:
                return tokens
            case Axis.OFFSET:
                return requests + 1
            case Axis.RANK:
                return num_ranks
        return 1

    def checked_number(self, number: Any, what: str) -> Number:
        """Return ``number`` if this slot's dtype holds it, exactly for bools and integers.

        Args:
            number: a Python or numpy number.
            what: what it is for, in the message.

        Raises:
            ConfigError: the dtype does not hold it.
        """
        kind = kind_of(self.dtype)
        if kind == "float":
            return self._checked_float(number, what)
        try:
            integer = operator.index(number)
        except TypeError:
            raise self._fault(f"{what} {number!r}", f"a number of {self.dtype}") from None
        low, high = (0, 1) if kind == "bool" else (torch.iinfo(self.dtype).min, torch.iinfo(self.dtype).max)
        if not low <= integer <= high:
            raise self._fault(f"{what} {number!r}", f"a value of {self.dtype} in [{low}, {high}]")
        return bool(integer) if kind == "bool" else integer

    def _checked_float(self, number: Any, what: str) -> float:
        if not hasattr(number, "__float__"):
            raise self._fault(f"{what} {number!r}", f"a number of {self.dtype}")
        value = float(number)
        largest = torch.finfo(self.dtype).max
        if math.isfinite(value) and abs(value) > largest:
            raise self._fault(f"{what} {number!r}", f"a value of {self.dtype} in [{-largest}, {largest}]")
        held = torch.tensor(value, dtype=self.dtype, device="cpu").item()
        if math.isinf(value) and held != value:
            raise self._fault(f"{what} {number!r}", f"a value of {self.dtype}, which has no infinity")
        return value

    def _check_name(self) -> None:
        named = isinstance(self.name, str) and self.name.isidentifier() and not keyword.iskeyword(self.name)
        if not named or self.name.startswith("_"):
            raise ConfigError(
                f"slot name {self.name!r}: expected a public Python identifier, because preps read view.<name>; "
                "rename the slot"
            )
        if self.name in RESERVED_NAMES:
            raise ConfigError(f"slot name {self.name!r} is reserved on every view; rename the slot")

    def _checked_inner(self) -> tuple[int, ...]:
        try:
            inner = tuple(operator.index(extent) for extent in self.inner)
        except TypeError:
            raise self._fault(f"inner={self.inner!r}", "a tuple of non-negative integers") from None
        if any(extent < 0 for extent in inner):
            raise self._fault(f"inner={inner}", "a tuple of non-negative integers")
        if type(self.row_dim) is not int:
            raise self._fault(f"row_dim={self.row_dim!r}", "an integer")
        limit = 0 if self.axis is Axis.FIXED else len(inner)
        if not 0 <= self.row_dim <= limit:
            raise self._fault(f"row_dim={self.row_dim}", f"0 to {limit}, the number of inner dimensions")
        return inner

    def _checked_accepts(self) -> tuple[torch.dtype, ...]:
        accepts: Any = (self.accepts,) if isinstance(self.accepts, torch.dtype) else self.accepts
        if not isinstance(accepts, Iterable):
            raise self._fault(f"accepts={accepts!r}", f"dtypes of the same kind as {self.dtype}")
        for dtype in (accepts := tuple(accepts)):
            if not isinstance(dtype, torch.dtype) or kind_of(dtype) != kind_of(self.dtype):
                raise self._fault(f"accepts {dtype!r}", f"dtypes of the same kind as {self.dtype}")
        return accepts

    def _check_values(self) -> None:
        if self.pad is REPEAT_LAST:
            if self.axis in (Axis.RANK, Axis.FIXED):
                raise self._fault(
                    f"pad REPEAT_LAST on axis {Axis(self.axis).value}", "a number: such a slot has no tail"
                )
        else:
            object.__setattr__(self, "pad", self.checked_number(self.pad, "pad"))
        for what in ("idle", "capture"):
            number = getattr(self, what)
            if number is not None and not (what == "capture" and callable(number)):
                object.__setattr__(self, what, self.checked_number(number, what))
        pair = isinstance(self.valid, (tuple, list)) and len(self.valid) == 2
        if self.valid is not None and not (pair and self.valid[0] <= self.valid[1]):
            raise self._fault(f"valid={self.valid!r}", "(low, high) with low <= high")
        if self.value is not None:
            self._check_computed()

    def _check_computed(self) -> None:
        if not isinstance(self.value, Computed):
            raise self._fault(f"value={self.value!r}", "one of " + ", ".join(c.name for c in Computed))
        if kind_of(self.dtype) != "integer":
            raise self._fault(f"value {self.value.name} in dtype {self.dtype}", "an integer dtype")
        if self.value is Computed.RANK_COUNTS and (self.axis is not Axis.RANK or self.inner):
            raise self._fault(
                f"value RANK_COUNTS on axis {Axis(self.axis).value}", "axis='rank' and no inner dimensions"
            )

    def _check_storage(self) -> None:
        if self.storage is None:
            return
        if not isinstance(self.storage, torch.Tensor) or self.storage.layout is not torch.strided:
            raise self._fault(f"storage {type(self.storage).__name__}", "a strided torch.Tensor")
        if self.storage.dtype != self.dtype:
            raise self._fault(f"storage of {self.storage.dtype}", f"the slot's own {self.dtype}")
        if any(stride == 0 and extent > 1 for extent, stride in zip(self.storage.shape, self.storage.stride())):
            raise self._fault("storage that overlaps itself", "one element of memory for each; pass .contiguous()")
        if self.storage.requires_grad:
            raise self._fault("storage that requires grad", "a plain buffer; pass storage.detach()")

    def _fault(self, seen: str, expected: str) -> ConfigError:
        return ConfigError(f"slot {self.name!r}: {seen} is not usable; expected {expected}")
