"""Declare a prep as a backend author does, and meet the refusals. Run: python write_a_prep.py

A prep turns the slots of one step into attention metadata. Glued, it runs as a captured graph: its
Python ran once, at capture. So it may read slots and tables on the device, and nothing that the
host would have to look at again.
"""

import logging

import torch

import graphglue as gg

logging.getLogger("graphglue").setLevel(logging.CRITICAL)  # the refusals below are wanted

SLOTS = [
    # A pad has no default. Length 1 keeps a pad row's softmax over something; row 0 of the table is
    # given to no request, so that pad rows read nobody's memory.
    gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1),
    gg.Slot("req_pool_indices", axis="request", dtype=torch.int64, pad=0, index_of="req_to_token"),
]
CONTRACT = gg.PrepContract(
    name="windowed",
    reads={"seq_lens": 1, "req_pool_indices": 0},  # the pads this prep is right for
    tables=("req_to_token",),
    outputs={"window_start": "token", "last_location": "token"},
    modes={gg.Mode.DECODE},
)
TABLE = torch.arange(6 * 32).reshape(6, 32)
WINDOW = 8  # a static number: capture bakes it, and that is right
SOURCES = {"seq_lens": [20, 3, 9], "req_pool_indices": [5, 2, 1]}


def windowed(view):
    """Find where each request's attention window starts, and where its last token lies."""
    last = view.seq_lens - 1
    rows = view.tables.req_to_token[view.req_pool_indices]
    return {
        "window_start": (view.seq_lens - WINDOW).clamp(min=0),
        "last_location": rows.gather(1, last[:, None]).squeeze(1),
    }


def reads_the_host(view):
    """Do the same, but cut the table at the longest request: .item() looks at the device."""
    longest = view.seq_lens.max().item()
    rows = view.tables.req_to_token[:, :longest][view.req_pool_indices]
    return {
        "window_start": (view.seq_lens - WINDOW).clamp(min=0),
        "last_location": rows.gather(1, view.seq_lens[:, None] - 1).squeeze(1),
    }


def runner_for(prep, contract=CONTRACT, slots=SLOTS):
    """Register a prep, and build a runner without a forward: the engine owns that."""
    registry = gg.Registry()
    registry.register(contract)(prep)
    names = {"registry": registry, "prep": contract.name, "tables": {"req_to_token": TABLE}}
    return gg.Runner(slots=slots, ladder=[2, 4], **names, device="cpu")


def declared_and_glued():
    """A host-free prep is captured once per bucket; padded steps replay it."""
    with runner_for(windowed) as runner:
        runner.capture()
        step = runner.prepare(gg.Batch(num_requests=3, sources=SOURCES))
        assert step.decision.prep is gg.Route.GLUE
        assert step.decision.reason is gg.Reason.PADDED
        assert step.metadata["window_start"].tolist() == [12, 0, 1, 0]
        assert step.metadata["last_location"].tolist() == [5 * 32 + 19, 2 * 32 + 2, 32 + 8, 0]
        print("windowed:      ", step.decision.prep.value, step.decision.reason.value)


def refused_at_capture():
    """A prep that reads the host can not be recorded, whatever its contract says."""
    with runner_for(reads_the_host) as runner:
        try:
            runner.capture()
        except gg.CaptureError as error:
            print("reads_the_host:", str(error).splitlines()[0])
        else:
            raise AssertionError("a prep that reads the host was captured")
        # It is quarantined, not lost: the step still runs, eagerly, and says why.
        step = runner.prepare(gg.Batch(num_requests=3, sources=SOURCES))
        assert step.decision.prep is gg.Route.EAGER
        assert step.decision.reason is gg.Reason.QUARANTINED
        assert step.metadata["window_start"].tolist() == [12, 0, 1, 0]


def declared_as_it_is():
    """Say so in the contract, and nobody tries to capture it."""
    honest = CONTRACT.model_copy(update={"host_free": False})
    with runner_for(reads_the_host, honest) as runner:
        step = runner.prepare(gg.Batch(num_requests=3, sources=SOURCES))
        assert step.decision.reason is gg.Reason.NOT_HOST_FREE
        print("declared so:   ", step.decision.prep.value, step.decision.reason.value)


def refused_at_construction():
    """A slot with another pad than the prep is right for never gets as far as a step."""
    refusal = ""
    lengths_of_zero = [gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=0), SLOTS[1]]
    try:
        runner_for(windowed, slots=lengths_of_zero)
    except gg.ContractError as error:
        refusal = str(error)
    assert refusal.startswith("slot 'seq_lens' has pad 0, but prep 'windowed' is right for 1")
    print("wrong pad:     ", refusal)


if __name__ == "__main__":
    declared_and_glued()
    refused_at_capture()
    declared_as_it_is()
    refused_at_construction()
