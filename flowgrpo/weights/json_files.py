"""Read JSON files of models, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..intake.json_text import parse_json


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: the file does not exist or is not JSON; the message names file and line.
    """
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); get the file again") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg}); is the file cut short?") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; get the file again") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ValueError as in `read_json`, and if the file holds no object."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; get the file again")
    return found
