"""Artifacts: JSON files that graphglue or an engine wrote, read back and checked."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from graphglue.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


def read_json(kind: type[Model], path: Path | str, wanted: str, advice: str) -> Model:
    """Read a model from a file.

    Args:
        kind: the model.
        path: the file.
        wanted: how the file is not that, for the message: "is no ..." or "holds no ...".
        advice: how such a file is written.

    Raises:
        ConfigError: no such file, or something else in it.
    """
    try:
        return kind.model_validate_json(Path(path).read_text(encoding="utf-8-sig"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path} {wanted}: {where}: {first['msg']}; {advice}") from error
    except (OSError, ValueError) as error:  # no text, or a path that no file system takes
        raise ConfigError(f"{path} can not be read: {error}") from error
