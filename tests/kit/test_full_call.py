"""The call with all samples gives each sample the score that it has in a small call."""

from pathlib import Path

import pytest

from flowgrpo.kit.check import CheckPlan, check_on
from flowgrpo.kit.findings import FAULT, NOTE, Finding, Report
from flowgrpo.kit.material import Material
from flowgrpo.kit.trial import Trial
from flowgrpo.rewards.base import RewardSpec

REWARDS = """
import itertools, math, torch

def mean(images):
    return images.mean(dim=(1, 2, 3))

def misplaced(images, prompts):
    found = torch.zeros(len(images))
    for first in range(0, len(images), 16):
        part = mean(images[first : first + 16])
        found[: len(part)] = part
    return found

def centred(images, prompts):
    return mean(images) - (mean(images).mean() if len(images) > 12 else 0)

def rounded(images, prompts):
    return mean(images) + (1e-3 * mean(images).std() if len(images) > 12 else 0)

class Sized:
    batch_size = 12

    def __call__(self, images, prompts):
        return centred(images, prompts)

class Compared:
    whole_group = True

    def __call__(self, images, prompts, groups):
        numbers = torch.tensor(groups)
        return torch.stack([x - mean(images)[numbers == g].mean() for x, g in zip(mean(images), groups)])

class Mixed(Compared):
    def __call__(self, images, prompts, groups):
        return super().__call__(images, prompts, groups) + (mean(images).mean() if len(images) > 12 else 0)

def unsteady(images, prompts):
    return mean(images) + 2e-4 * torch.rand(len(images))

def rarely(images, prompts):
    return mean(images) + (torch.rand(len(images)) if len(images) > 12 else 0)

def limited(images, prompts):
    if len(images) > 12:
        raise RuntimeError("too many pictures")
    return mean(images)

class Quota:
    spent = False

    def __call__(self, images, prompts):
        self.spent |= len(images) > 12
        return [math.nan] * len(images) if self.spent else mean(images)
"""


@pytest.fixture
def examine(tmp_path: Path, scenes: Material):
    (tmp_path / "mine.py").write_text(REWARDS)

    def run(name: str) -> Report:
        trial = Trial(RewardSpec(f"{tmp_path}/mine.py:{name}"))
        return check_on(trial, {"drawn": scenes}, CheckPlan(), Report(trial.name, trial.task))

    return run


def of_code(report: Report, *codes: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.code in codes]


@pytest.mark.parametrize("name", ["misplaced", "centred"])
def test_scores_that_only_a_large_call_spoils_are_a_fault(examine, name: str):
    report = examine(name)
    assert report.convictions == {"batch"}, report.text()
    (found,) = of_code(report, "batch")
    assert found.severity == FAULT
    assert "in the call with all 24 samples, compared with a call with 12 of them" in found.seen


def test_a_small_difference_of_a_large_call_is_a_note(examine):
    (found,) = of_code(examine("rounded"), "batch")
    assert found.severity == NOTE


def test_a_reward_with_a_size_of_calls_is_compared_in_such_calls(examine):
    assert of_code(examine("Sized"), "batch") == []


def test_groups_are_compared_only_whole(examine):
    """The first call has four of the six samples of a group, and so other means of the groups."""
    assert of_code(examine("Compared"), "batch", "random", "state") == []
    (found,) = of_code(examine("Mixed"), "batch")
    assert found.severity == FAULT
    assert "compared with a call with 6 of them" in found.seen


def test_what_is_random_is_not_said_to_depend_on_the_call(examine):
    report = examine("unsteady")
    assert [finding.severity for finding in of_code(report, "random")] == [NOTE]
    assert report.convictions == set(), report.text()
    assert "in the call with all" not in report.text()
    report = examine("rarely")
    assert report.convictions == {"random"}, report.text()
    assert len(of_code(report, "random", "state", "batch")) == 1
    assert "global random generator" in of_code(report, "random")[0].seen


def test_a_failure_of_a_large_call_is_a_fault(examine):
    report = examine("limited")
    assert report.convictions == {"failure"}, report.text()
    (found,) = of_code(report, "failure")
    assert found.severity == FAULT
    assert found.seen == "it scores the first 12 samples, and fails on 24 drawn scenes: RuntimeError: too many pictures"


def test_a_large_call_without_a_number_is_a_fault_and_has_no_distribution(examine):
    report = examine("Quota")
    assert report.convictions == {"absent"}, report.text()
    (found,) = of_code(report, "absent")
    assert found.seen == "it gives numbers in the first call, with 12 samples, and none in the call with all 24"
    assert set(report.tables) == {"edges"}
    assert "distribution, noise" in report.skipped
    assert report.as_json()
