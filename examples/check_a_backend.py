"""Check one's own prep by the conformance suite. Run: pytest check_a_backend.py, or python check_a_backend.py

The suite audits the prep (what it reads, what it bakes, what padding does to it) and drives the runner with
drawn batches: capture, padded against eager, IDLE steps, moved tables, overwritten sources, refused batches.
"""

import sys

import torch

import graphglue as gg
from graphglue.testing import conformance

WINDOW = 4
CONTRACT = gg.PrepContract(
    name="window",
    reads={"seq_lens": 1, "rows": 0},
    tables=("req_to_token",),
    outputs={"window": "request"},
    modes={gg.Mode.DECODE},
)


def prep(view):
    """List the newest locations of each request, -1 where there are fewer."""
    places = view.seq_lens[:, None] - 1 - torch.arange(WINDOW, device=view.seq_lens.device)
    found = view.tables.req_to_token[view.rows].gather(1, places.clamp(min=0))
    return {"window": torch.where(places >= 0, found, -1)}


def make_backend():
    """Give a runner's arguments; the suite builds one for each of its cases."""
    registry = gg.Registry()
    registry.register(CONTRACT)(prep)
    return {
        "slots": [
            gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1, valid=(1, 16)),
            gg.Slot("rows", axis="request", dtype=torch.int64, pad=0, index_of="req_to_token"),
        ],
        "ladder": [1, 2, 4],
        "prep": "window",
        "registry": registry,
        "tables": {"req_to_token": torch.arange(6 * 16).view(6, 16)},
    }


test = conformance(make_backend, perturb=lambda: None)

if __name__ == "__main__":
    import pytest

    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]))
