"""What the check of a recipe finds: faults, notes, and the data of a recipe that can run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..configs.schema import AnyRecipe
from ..rewards.base import MissingDependency
from ..weights.adapter_files import MissingAdapter
from ..weights.lora_conversion import UnreadBase
from .data import Data, MissingPrompts
from .prompts.hub_sets import NotFetched

Kind = Literal["fault", "needed", "excused", "unknown", "note"]


@dataclass(frozen=True)
class Fault:
    """A finding of the check of a recipe.

    Attributes:
        kind: `fault`: the recipe cannot run. `needed`: the recipe cannot run here, because a file or a package is
            missing. `excused`: as `needed`, for a recipe that comes without its files. `unknown`: only a request over
            the network can tell. `note`: the recipe runs, but maybe not as its author thinks.
        text: what is wrong, where, and what to write instead.
        key: the key of the recipe, if the finding is about one key.
    """

    kind: Kind
    text: str
    key: str = ""


def hub_note(place: str, path: str) -> str:
    """What a check says of a model that may be on the hub."""
    return f"{place} {path} is not a folder here, so it is taken for a hub id, which is read when a run starts"


@dataclass
class Checked:
    """A recipe after its check.

    Attributes:
        recipe: the checked recipe.
        findings: all findings.
        fetches: whether prompts of the hub may be downloaded.
        folder: of the model, or its hub id; "" if there is none.
        data: prompts with their pictures; None if they cannot be read.
    """

    recipe: AnyRecipe
    findings: list[Fault] = field(default_factory=list)
    fetches: bool = True
    folder: str = ""
    data: Data | None = None

    @property
    def faulty(self) -> set[str]:
        """The sections of the recipe with faults, such as `model`."""
        return {finding.key.partition(".")[0] for finding in self.findings if finding.kind == "fault"}

    def texts(self, *kinds: Kind) -> list[str]:
        """The texts of the findings of some kinds."""
        return [finding.text for finding in self.findings if finding.kind in kinds]

    def excuse(self, keys: Collection[str]) -> None:
        """Excuse missing files and packages of these keys, and of keys within them.

        Some recipes of the package come without their files.
        """
        self.findings = [
            replace(finding, kind="excused")
            if finding.kind == "needed" and f"{finding.key}.".startswith(tuple(f"{key}." for key in keys))
            else finding
            for finding in self.findings
        ]

    def attempt(self, key: str, check: Callable[..., Any], *given: Any) -> Any:
        """The result of a check; None if the check failed, and then its fault is added to the findings."""
        try:
            return check(*given)
        except (NotFetched, UnreadBase) as error:
            self.findings.append(Fault("unknown", str(error), key))
        except (MissingDependency, MissingPrompts, MissingAdapter) as error:
            self.findings.append(Fault("needed", str(error), key))
        except (ValueError, OSError) as error:
            self.findings.append(Fault("fault", str(error), key))
        return None

    def require(self) -> Data:
        """The data of a recipe that can run.

        Raises:
            ValueError: the recipe cannot run; the message has a line for each fault.
        """
        faults = self.texts("fault", "needed")
        if faults or self.data is None:
            raise ValueError("\n".join(faults))
        return self.data
