"""JSON files of models, read with a message that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: there is no such file, or it is no JSON; names file and line.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); get the file again") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg}); is the file cut short?") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be JSON of ours") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ValueError as `read_json`, and for anything else in it."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; get the file again")
    return found
