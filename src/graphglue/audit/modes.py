"""Calls of a prep that leave no torch mode behind: one that stays on changes every later operation of its thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch


class ModeLeft(Exception):
    """Say that a prep left a torch mode on."""


def call(prep: Callable[..., Any], view: Any) -> Any:
    """Call a prep, and switch off what modes it leaves on.

    Raises:
        ModeLeft: it left one.
    """
    before = modes_on()
    try:
        result = prep(view)
    except BaseException:
        switch_off(before)
        raise
    if switch_off(before):
        raise ModeLeft("the prep left a torch dispatch or function mode on; enter modes by a with statement")
    return result


def modes_on() -> tuple[int, int]:
    """Count the dispatch and function modes that are on."""
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def switch_off(before: tuple[int, int]) -> bool:
    """Switch off the modes that came on since they were counted; tell whether there were any."""
    found = modes_on() != before
    while torch._C._len_torch_dispatch_stack() > before[0]:
        _python_dispatch._pop_mode()
    while torch._C._len_torch_function_stack() > before[1]:
        overrides._pop_mode()
    return found
