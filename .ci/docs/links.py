"""Links of the pages: README's own links, and a link on every public name that stands in code.

``Runner.replay`` or ``gg.Ladder`` in a docstring or a page leads to its entry, and a name of a public class that has
no such member is a broken link, which ``mkdocs build --strict`` refuses.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# The first that has a name gives the entry; nested modules of ``__all__`` are modules on their pages.
MODULES = (
    "graphglue", "graphglue.ranks", "graphglue.audit", "graphglue.testing", "graphglue.testing.strategies",
    "graphglue.budget", "graphglue.exporter", "graphglue.flight", "graphglue.report", "graphglue.preps",
    "graphglue.doctor", "graphglue.demo",
)  # fmt: skip
WHOLE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
_CODE = re.compile(r"<code>(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?</code>")
_PREPS = re.compile(r"^::: graphglue\.preps\.(?!register)(\w+)$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links of README and of pages that lead to files lead to pages; list the examples on theirs."""
    if source := WHOLE.get(page.file.src_uri):
        markdown = (ROOT / source).read_text()
    if page.file.src_uri == "examples.md":
        markdown += "".join(_example(path) for path in sorted((ROOT / "examples").rglob("*.py")))
    markdown = _PREPS.sub(lambda found: found[0] + _metadata(found[1]), markdown)
    markdown = re.sub(r"\]\((?:\.\./)*examples/(?:\w+/)*(\w+)\.py\)", r"](examples.md#\1)", markdown)
    markdown = re.sub(r"\]\((?:\.\./)*CHANGELOG\.md\)", "](changelog.md)", markdown)
    return re.sub(r"\]\((?:\.\./)*README\.md", "](index.md", markdown.replace("](.ci/docs/pages/", "]("))


def on_page_content(html: str, **_: Any) -> str:
    """Link public names that stand in code."""
    return _CODE.sub(_linked, html)


def _linked(found: re.Match[str]) -> str:
    head, *rest = found["name"].removeprefix("gg.").split(".")
    if found["name"].startswith("graphglue."):
        target, optional = found["name"], " optional"  # modules that are private have no entry
    elif head in NAMES and (head[0].isupper() or found["name"].startswith("gg.")):
        target, optional = ".".join([NAMES[head], *rest]), ""
    else:
        return found[0]
    return f'<autoref identifier="{target}"{optional}>{found[0]}</autoref>'


def exported(module: str) -> list[str]:
    """Read the ``__all__`` of a module."""
    path = ROOT / "src" / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise LookupError(f"{path} has no __all__")


def _metadata(module: str) -> str:
    """Give what the prep that a module's ``make`` makes says of its slots, tables and results."""
    path = ROOT / "src" / "graphglue" / "preps" / f"{module}.py"
    makers = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "make"]
    preps = [node for maker in makers for node in ast.walk(maker) if isinstance(node, ast.FunctionDef)][1:]
    said = [text for prep in preps if "Returns:" in (text := ast.get_docstring(prep) or "")]
    return "".join(f"\n\nThe prep that `make` makes:\n\n```text\n{text}\n```\n" for text in said)


def _example(path: Path) -> str:
    return f"\n\n## {path.stem}\n\n`{path.relative_to(ROOT)}`\n\n```python\n{path.read_text()}```\n"


NAMES = {name: f"{module}.{name}" for module in reversed(MODULES) for name in exported(module)}
