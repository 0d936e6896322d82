"""Replay a padded decode step on the CPU tape. Run: python quickstart_cpu.py"""

import torch

import graphglue as gg

PAGE = 4
table = torch.arange(8 * 16).reshape(8, 16)  # where the KV of each request's positions is; row 0 is for pads
table[0] = 0
weights = torch.randn(32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

slots = [
    gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1),
    gg.Slot("req_pool_indices", axis="request", dtype=torch.int64, pad=0, index_of="req_to_token"),
    gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0),
]
registry = gg.Registry()


@registry.register(
    gg.PrepContract(
        name="pages",
        reads={"seq_lens": 1, "req_pool_indices": 0},
        tables=("req_to_token",),
        outputs={"page_table": "token", "positions": "token"},
        modes={gg.Mode.DECODE},
    )
)
def pages(view):
    """Find each row's pages and position."""
    first = view.tables.req_to_token[:, ::PAGE][view.req_pool_indices]
    return {"page_table": (first // PAGE).to(torch.int32), "positions": view.seq_lens - 1}


def forward(view, metadata):
    """Stand in for a model."""
    rows = metadata["page_table"].sum(dim=1) + metadata["positions"] + view.input_ids
    return {"logits": weights[rows % 32] @ weights}


setup = {"slots": slots, "registry": registry, "prep": "pages", "tables": {"req_to_token": table}}
with gg.Runner(**setup, ladder=[1, 2, 4], forward=forward, device="cpu") as runner:
    runner.capture()
    sources = {"seq_lens": [5, 9, 2], "req_pool_indices": [3, 1, 7], "input_ids": [10, 20, 30]}
    step = runner.replay(gg.Batch(num_requests=3, sources=sources))

    assert (step.decision.prep, step.decision.reason) == (gg.Route.GLUE, gg.Reason.PADDED)
    assert step.decision.bucket == gg.Bucket(requests=4, tokens=4, row_tokens=1)
    assert step.metadata["positions"].tolist() == [4, 8, 1, 0]  # the last row is the pad's
    assert step.metadata["page_table"][0].tolist() == [12, 13, 14, 15]
    rows = torch.tensor([12 + 13 + 14 + 15 + 4 + 10, 4 + 5 + 6 + 7 + 8 + 20, 28 + 29 + 30 + 31 + 1 + 30])
    torch.testing.assert_close(step.outputs["logits"], weights[rows % 32] @ weights)
    print(step.decision.reason.value, "step replayed; outputs", tuple(step.outputs["logits"].shape))
