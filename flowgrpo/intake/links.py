"""Links in a run folder: what is read and written there stays there.

A run folder of somebody else may hold symbolic links. If `votes.jsonl` were a link to a file in your home, a vote would
be written into that file. So every command that opens a run folder first looks at all links in it. Links that stay
within the folder are fine. If a link leads out, the command ends and says which.

The folder itself may be a link, or lie below one: you have named it, so you know where it leads. You may also have
moved a part of your own run, such as `checkpoints`, to another disk, and linked it. Then say `--trust` once. This
machine remembers the folder with these very links, and a link that is added or changed later is asked about again.

Two things are beyond this check: hard links, which no program can tell from files, and another user who may write in
the folder and changes it while a command runs.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from . import ledger

MOST = 5


def links_out(folder: Path) -> dict[str, str]:
    """Links that lead out of a folder: path within the folder -> where the link leads.

    Raises:
        ValueError: the folder holds a named pipe or a device, from which a command would read for ever.
    """
    root = os.path.realpath(folder)
    found: dict[str, str] = {}
    waiting = [root]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    if target != root and not target.startswith(os.path.join(root, "")):
                        found[os.path.relpath(entry.path, root)] = target
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    _refuse_special(entry, root, folder)
    return dict(sorted(found.items()))


def _refuse_special(entry: os.DirEntry[str], root: str, folder: Path) -> None:
    mode = entry.stat(follow_symlinks=False).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        kind = "a named pipe" if stat.S_ISFIFO(mode) else "a device"
        place = folder / os.path.relpath(entry.path, root)
        raise ValueError(f"{place} is {kind}, which no run writes; remove it, and look where the folder comes from")


def check_links(folder: Path) -> None:
    """Refuse a folder with links that lead out of it, unless this machine remembers the folder with these links.

    Raises:
        ValueError: a link leads out; the message says which, and where to. Or the folder holds a pipe or a device.
    """
    found = links_out(folder) if folder.is_dir() else {}
    if found and not ledger.trusted(_identity(folder, found)):
        listed = [f"{folder / name} → {target}" for name, target in list(found.items())[:MOST]]
        more = f", and {len(found) - MOST} more" if len(found) > MOST else ""
        raise ValueError(
            f"{folder} has links that lead out of it, and files elsewhere would be read or overwritten: "
            f"{', '.join(listed)}{more}. If you made them, add --trust; otherwise remove them, or put copies in their "
            "place"
        )


def trust_links(folder: Path) -> str | None:
    """Remember a folder with its links; returns a sentence if that cannot be remembered.

    Raises:
        ValueError: the folder holds a pipe or a device.
    """
    found = links_out(folder) if folder.is_dir() else {}
    if not found:
        return None
    return ledger.trust({_identity(folder, found): f"links of {os.path.realpath(folder)}: {', '.join(found)}"[:500]})


def _identity(folder: Path, found: dict[str, str]) -> str:
    return ledger.digest(["links", os.path.realpath(folder), found])
