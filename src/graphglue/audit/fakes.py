"""One run of a prep on fake tensors, which have shapes and no contents: what needs contents shows.

On the CPU the tape records on fakes already; on a GPU a capture runs for real, so this is the run that shows a read
of contents which no rule knows.
"""

from __future__ import annotations

import torch
from torch._subclasses import fake_tensor

from graphglue.audit.certificate import Finding, Verdict
from graphglue.audit.subject import Subject
from graphglue.audit.witness import place_of
from graphglue.core.keys import Key
from graphglue.core.view import View

_READS = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


def imitate(subject: Subject, key: Key) -> tuple[Verdict, Finding] | None:
    """Run a prep on fake tensors; say what it needed contents for, or why it can not be run so. None if it can.

    A prep that memoises must have run for real before, and run for real afterwards, or it keeps fakes. Sync: none.
    """
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    view = subject.view(key)
    slots = {name: mode.from_tensor(view[name]) for name in view}
    tables = {name: mode.from_tensor(view.tables[name]) for name in view.tables}
    faked = View(slots, tables, view.bucket, view.mode, view.variant, f"prep {subject.name!r}")
    try:
        with torch.no_grad(), mode:
            subject.prep(faked)
    except _READS as error:
        text = "needs the contents of a tensor, which a recording does not have; keep values and shapes on the device"
        return Verdict.FAIL, Finding(text=text, op=str(error.func), where=place_of(error))
    except Exception as error:
        text = (
            f"can not be run on fake tensors, so what it does outside torch's operations was not seen: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'}"
        )
        return Verdict.UNKNOWN, Finding(text=text, where=place_of(error))
    return None
