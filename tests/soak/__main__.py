"""Soak for as long as wanted: ``python -m tests.soak --steps 1000000 --device cpu``.

Exits with 1 at the first fault.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from graphglue import Tape

from .soak import Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--upkeep-every", type=int, default=5000, help="steps between two actions on the runner")
    parser.add_argument("--check-every", type=int, default=16, help="one step of so many has its results checked")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("graphglue").setLevel(logging.ERROR)  # keys are broken on purpose
    freeze_imports()
    soak = Soak(given.device, given.seed, given.upkeep_every, given.check_every)
    try:
        with tqdm(total=given.steps, unit="step", disable=None, mininterval=2) as bar:
            result = soak.run(given.steps, bar.update)
    except AssertionError as error:
        print(f"tests.soak: {error}", file=sys.stderr)
        return 1
    text = json.dumps(result, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")
    return 0


def freeze_imports() -> None:
    """Leave what imports made out of every collection: each capture begins with one, and none of it is garbage."""
    one = torch.ones(1)
    Tape().record(lambda: one + 1).replay()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
