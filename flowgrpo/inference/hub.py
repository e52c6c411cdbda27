"""Repositories of models on the hub of Hugging Face, through its own client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .uploads import Upload

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@dataclass(frozen=True)
class Repository:
    """A repository of a model, which may not exist yet.

    Attributes:
        name: OWNER/NAME.
        url: its page.
        private: whether only its owner sees it; None if it does not exist yet, or this token does not see it.
    """

    name: str
    url: str
    private: bool | None


def find_repository(name: str) -> Repository:
    """Look whether a repository exists.

    Raises:
        ValueError: the name is none, there is no token, the hub is switched off, or it does not answer.
    """
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    if name.count("/") != 1:
        raise ValueError(f"{name!r} is not the name of a repository; write OWNER/NAME, where OWNER is you or your team")
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise ValueError(f"{name!r} is not the name of a repository: {error}") from None
    api = _client()
    private = None
    with _asking(f"look at {name}", api), suppress(RepositoryNotFoundError):
        private = bool(api.model_info(name).private)
    return Repository(name, f"{api.endpoint}/{name}", private)


def send(upload: Upload, repository: Repository, *, private: bool, message: str) -> str:
    """Make the repository if it does not exist, and upload files as one commit; returns the address of the commit.

    What is in the repository and not in the upload stays there.

    Raises:
        ValueError: the hub refuses, or does not answer.
    """
    from huggingface_hub import CommitOperationAdd

    api = _client()
    with _asking(f"upload to {repository.name}", api):
        if repository.private is None:
            api.create_repo(repository.name, private=private or None, exist_ok=True)
        # Not `upload_folder`: so the files are exactly those that were shown, and a changed one needs no copy on disk.
        files: list[Any] = [
            CommitOperationAdd(name, held if isinstance(held, bytes) else str(held))
            for name, held in upload.files.items()
        ]
        return str(api.create_commit(repository.name, files, commit_message=message).commit_url)


def _client() -> HfApi:
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ValueError("the hub is switched off by HF_HUB_OFFLINE; unset it to upload")
    token = get_token()
    if token is None:
        raise ValueError(
            "there is no token for the hub, so nothing can be uploaded; make one that may write at "
            "https://huggingface.co/settings/tokens, and run `hf auth login` or set HF_TOKEN"
        )
    return HfApi(token=token, library_name="flowgrpo")


@contextmanager
def _asking(what: str, api: HfApi) -> Iterator[None]:
    """A context in which the client asks the hub; whatever fails there becomes a message."""
    try:
        yield
    except Exception as error:  # the client's versions raise the errors of different libraries
        cause = error.__cause__ or error if isinstance(error, RuntimeError) else error
        said = " ".join(str(cause).split()).rstrip(".") or type(cause).__name__
        raise ValueError(
            f"cannot {what} on {api.endpoint}: {said:.500}; check the name, the network, and that the token may write"
        ) from error
