"""graphglue: declared, checked, one-launch replay of an LLM engine's decode steps.

Importing it initialises no device.
"""

from graphglue.cache import GlueGraphCache
from graphglue.capture import CaptureHooks
from graphglue.config import RunnerConfig, Shadow
from graphglue.core.batch import Batch, Mode
from graphglue.core.buckets import Bucket, Ladder
from graphglue.core.contract import PrepContract
from graphglue.core.keys import Key
from graphglue.core.routing import Decision, Reason, Route, State
from graphglue.core.slots import REPEAT_LAST, Axis, Computed, Slot
from graphglue.core.view import View
from graphglue.device.arena import Arena
from graphglue.errors import (
    BindError,
    CapacityError,
    CaptureError,
    ClosedError,
    ConfigError,
    ContractError,
    DivergenceError,
    GraphGlueError,
    RankDisagreementError,
    SegmentError,
    StaleTableError,
)
from graphglue.graphs.segments import SegmentedRecording, breaks_reached, eager_break, record_segments
from graphglue.graphs.tape import Tape
from graphglue.registry import Registry
from graphglue.runner import Runner
from graphglue.step import Prepared, Step

RAW_REQUESTS = Computed.RAW_REQUESTS
RAW_TOKENS = Computed.RAW_TOKENS
BUCKET_REQUESTS = Computed.BUCKET_REQUESTS
BUCKET_TOKENS = Computed.BUCKET_TOKENS
RANK_COUNTS = Computed.RANK_COUNTS

__version__ = "0.1.0"

__all__ = [
    "BUCKET_REQUESTS",
    "BUCKET_TOKENS",
    "RANK_COUNTS",
    "RAW_REQUESTS",
    "RAW_TOKENS",
    "REPEAT_LAST",
    "Arena",
    "Axis",
    "Batch",
    "BindError",
    "Bucket",
    "CapacityError",
    "CaptureError",
    "CaptureHooks",
    "ClosedError",
    "Computed",
    "ConfigError",
    "ContractError",
    "Decision",
    "DivergenceError",
    "GlueGraphCache",
    "GraphGlueError",
    "Key",
    "Ladder",
    "Mode",
    "PrepContract",
    "Prepared",
    "RankDisagreementError",
    "Reason",
    "Registry",
    "Route",
    "Runner",
    "RunnerConfig",
    "SegmentError",
    "SegmentedRecording",
    "Shadow",
    "Slot",
    "StaleTableError",
    "State",
    "Step",
    "Tape",
    "View",
    "__version__",
    "breaks_reached",
    "eager_break",
    "record_segments",
]
