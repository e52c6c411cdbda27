"""The work of `flowgrpo rewards check --optimise`, without the reading of the command line."""

from __future__ import annotations

from pathlib import Path

from ..rewards.base import RewardSpec
from ..training.folder.run_folder import write_text
from ..training.reporting.reporter import Reporter
from .findings import Report
from .optimise import optimise, read_samples, report_change
from .sheet import write_sheet


def check_optimised(spec: RewardSpec, report: Report, iterations: int, folder: Path, reporter: Reporter) -> list[Path]:
    """Train for a reward, and add the changes that training made to the report.

    Returns:
        The files written: `preference.json` in the run folder, and for pictures also `preference.png`.

    Raises:
        ValueError: the folder is not empty, or the reward does not fit the embedded model's prompts.
        RewardError: the reward fails.
    """
    # The run gets a report of its own, because the earlier findings are printed already.
    found = Report(report.reward, report.task, report.accepted)
    run = optimise(spec, report.task, report.reward, iterations, folder, reporter)
    samples = read_samples(run)
    report_change(samples, report.task, report.reward, found)
    written = [run.path / "preference.json"]
    write_text(written[0], found.as_json())
    if report.task == "images":
        others = [name for name in samples[0].scores_before if name != report.reward]
        written.append(run.path / "preference.png")
        write_sheet(written[1], samples, [report.reward, *others])
    report.findings += found.findings
    report.tables |= found.tables
    return written


def write_report(report: Report, json: Path | None) -> None:
    """Write a report as JSON, if a file is named."""
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_text(json, report.as_json())
