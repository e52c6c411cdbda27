"""Data sets of the hub: which commit is read, and the download of the files of one split.

Files go to the cache of huggingface_hub, commit by commit. Without a network, what is in the cache is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...configs.prompt_source import PromptSource
from .data_sets import CARD, MissingFiles, OpenedSet, library, open_folder, read_files, set_files

_COMMIT = re.compile(r"[0-9a-f]{40}")


class NotFetched(ValueError):
    """A data set of the hub is not on this machine, and may not be downloaded now."""


def open_hub(source: PromptSource, fetch: bool) -> OpenedSet:
    """The rows of a data set of the hub.

    Args:
        source: names the data set.
        fetch: whether what is not on this machine may be downloaded.

    Raises:
        NotFetched: the data set is not on this machine, and `fetch` is off.
        ValueError: there is no such data set, revision, configuration or split, or the hub cannot be reached and the
            data set is not on this machine.
    """
    library()
    commit, why = _commit(source) if fetch else (None, None)
    if commit is None:
        try:
            return open_folder(_cached(source, why), source)
        except MissingFiles:
            raise _not_here(source, why) from None
    with _clear(source):
        base = f"hf://datasets/{source.path}@{commit}"
        names, split = set_files(base, _card(source, commit), source)
        # The card says which files belong to a split, so it is kept beside them.
        folder = _downloaded(source, source.revision, [CARD, *names])
        if folder.name != commit:  # there is a new commit since
            folder = _downloaded(source, commit, [CARD, *names])
    return read_files(folder, names, split, source)


def _downloaded(source: PromptSource, revision: str | None, names: Sequence[str]) -> Path:
    """The folder of a revision in the cache, with some files; the cache notes which commit the revision is."""
    patterns = [_literal(name) for name in names]
    return Path(_hub().snapshot_download(source.path, repo_type="dataset", revision=revision, allow_patterns=patterns))


def pinned(source: PromptSource) -> PromptSource:
    """The source at the commit that its revision means now, so that a run that goes on reads the same rows.

    Raises:
        ValueError: see `open_hub`.
    """
    if not source.hub or (source.revision is not None and _COMMIT.fullmatch(source.revision)):
        return source
    commit, why = _commit(source)
    return source.at(commit or _cached(source, why).name)


def _hub() -> Any:
    import huggingface_hub

    return huggingface_hub


def _commit(source: PromptSource) -> tuple[str | None, Exception | None]:
    """The commit of a revision; None if the hub cannot be reached, and then the reason."""
    try:
        with _clear(source):
            return str(_hub().HfApi().dataset_info(source.path, revision=source.revision, timeout=30.0).sha), None
    except _Unreachable as error:
        return None, error.reason


class _Unreachable(ValueError):
    """The hub gives no answer.

    Args:
        reason: the error of the library.
        text: what went wrong, and what to do.
    """

    def __init__(self, reason: Exception, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@contextmanager
def _clear(source: PromptSource) -> Iterator[None]:
    """A context in which errors of the hub say what to do."""
    from huggingface_hub import errors

    name, where = source.path, f" at revision {source.revision}" if source.revision else ""
    try:
        yield
    except errors.GatedRepoError:
        raise ValueError(
            f"{source}: the owner of {name} asks who reads it; accept the terms on its page, and sign in: hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{source}: {name} has no revision {source.revision!r}; look at its page") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"{source}: the hub has no data set {name}{where}, or you may not read it; check the name, or sign in: hf "
            "auth login"
        ) from None
    except ValueError:
        raise
    except Exception as error:  # what the library lets through depends on its version and its client
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise _Unreachable(
            error, f"{source}: the hub cannot be read ({why}); check the network, and try again"
        ) from error


def _card(source: PromptSource, commit: str) -> str:
    from huggingface_hub import errors

    try:
        path = _hub().hf_hub_download(source.path, CARD, repo_type="dataset", revision=commit)
    except errors.EntryNotFoundError:
        return ""
    return Path(path).read_text(encoding="utf-8-sig", errors="replace")


def _cached(source: PromptSource, why: Exception | None) -> Path:
    """The folder of a commit in the cache."""
    try:
        # The cache may hold some of the files only; with the card alone, the library does not ask for the others.
        return Path(
            _hub().snapshot_download(
                source.path,
                repo_type="dataset",
                revision=source.revision,
                allow_patterns=[CARD],
                local_files_only=True,
            )
        )
    except Exception as error:  # as in `_clear`
        raise _not_here(source, why) from error


def _not_here(source: PromptSource, why: Exception | None) -> ValueError:
    """The error for a data set, or a split, that is not on this machine; `why` it cannot be downloaded."""
    if why is None:
        return NotFetched(f"{source} is not on this machine; it is downloaded when a run starts")
    from huggingface_hub import constants

    # Older versions of the library have another error once they had a network.
    offline = type(why).__name__ == "OfflineModeIsEnabled" or constants.HF_HUB_OFFLINE
    reason = (
        "HF_HUB_OFFLINE is set: unset it" if offline else f"the hub gives no answer ({type(why).__name__}): try again"
    )
    revision = f" --revision {source.revision}" if source.revision else ""
    return ValueError(
        f"{source} is not on this machine, and {reason}, or download it where there is a network: `hf download "
        f"{source.path} --repo-type dataset{revision} --local-dir FOLDER`, and write FOLDER in its place"
    )


def _literal(name: str) -> str:
    """A pattern that only one name matches."""
    return re.sub(r"([*?[])", r"[\1]", name)
