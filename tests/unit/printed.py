"""What README.md and the pages of .ci/docs print."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = ROOT / ".ci" / "docs" / "pages"
PRINTED = {page.name: page.read_text() for page in sorted(PAGES.glob("*.md"))}


def blocks(info: str, text: str = README) -> list[str]:
    """Give the fenced blocks whose fence says ``info``."""
    return re.findall(rf"^```{info}$\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Give the arguments of each ``python -m graphglue`` command of the blocks that say sh."""
    lines = [line for block in blocks("sh", text) for line in block.splitlines()]
    return [line.removeprefix("python -m graphglue ").split() for line in lines]


def rows(text: str, first: str) -> list[list[str]]:
    """Give the cells of the table whose head begins with ``first``."""
    table = text[text.index(f"\n| {first} |") + 1 :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
