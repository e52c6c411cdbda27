"""The results of the checks of a reward: findings with a severity, and a report that collects them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

FAULT, WARNING, NOTE = "fault", "warning", "note"
SEVERITIES = (FAULT, WARNING, NOTE)


@dataclass(frozen=True)
class Finding:
    """One thing that was seen.

    Attributes:
        code: one word that names the kind of finding; `--accept` takes this word.
        severity: "fault" (training would stop or learn from wrong numbers), "warning" (training may do so), or "note".
        seen: what was seen, with numbers.
        advice: what to do; empty where there is nothing to do.
        numbers: the numbers again, for programs.
    """

    code: str
    severity: str
    seen: str
    advice: str = ""
    numbers: Mapping[str, float | None] = field(default_factory=dict)

    def text(self) -> str:
        """The finding on one line, and the advice on the next line."""
        line = f"{self.severity:<8} {self.code:<12} {self.seen}"
        return f"{line}\n{'':<21} {self.advice}" if self.advice else line

    def as_record(self) -> dict[str, Any]:
        """The finding, ready for JSON; a number that is not finite is None."""
        numbers = {key: finite(value) for key, value in self.numbers.items()}
        return {
            "code": self.code, "severity": self.severity, "seen": self.seen, "advice": self.advice, "numbers": numbers,
        }  # fmt: skip


@dataclass
class Report:
    """Findings about one reward, in the order in which they were made, and tables of what was measured.

    Attributes:
        reward: its name.
        task: "images" or "text".
        accepted: codes of findings that the author intends; these findings become notes.
        findings: the findings so far.
        skipped: check -> why it was not made.
        tables: name -> rows, for JSON.
        lines: the same tables in words, for people.
    """

    reward: str
    task: str
    accepted: Collection[str] = ()
    findings: list[Finding] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def add(self, code: str, severity: str, seen: str, advice: str = "", **numbers: float | None) -> None:
        """Add a finding."""
        if code in self.accepted and severity != NOTE:
            severity, seen = NOTE, f"accepted {severity}: {seen}"
        self.findings.append(Finding(code, severity, seen, advice, numbers))

    def has(self, *codes: str) -> bool:
        """Whether a fault or warning of one of these codes was found, accepted or not."""
        return any(
            finding.code in codes and (finding.severity != NOTE or finding.code in self.accepted)
            for finding in self.findings
        )

    @property
    def unused(self) -> list[str]:
        """Accepted codes without a finding."""
        found = {finding.code for finding in self.findings}
        return [code for code in self.accepted if code not in found]

    @property
    def convictions(self) -> set[str]:
        """Codes of all faults and warnings."""
        return {finding.code for finding in self.findings if finding.severity != NOTE}

    def count(self, severity: str) -> int:
        """How many findings of a severity there are."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The numbers of faults, warnings and notes in words."""
        parts = [f"{self.count(kind)} {kind}{'s' * (self.count(kind) != 1)}" for kind in SEVERITIES]
        return ", ".join(parts)

    def text(self) -> str:
        """The report for people: worst first."""
        lines = [f"{self.reward}: {self.verdict}"]
        lines += [one.text() for severity in SEVERITIES for one in self.findings if one.severity == severity]
        lines += [f"skipped  {check:<12} {why}" for check, why in self.skipped.items()]
        return "\n".join([*lines, *self.lines])

    def as_json(self) -> str:
        """Everything, as JSON."""
        record = {
            "reward": self.reward,
            "task": self.task,
            "verdict": {severity: self.count(severity) for severity in SEVERITIES},
            "findings": [finding.as_record() for finding in self.findings],
            "skipped": self.skipped,
            "tables": self.tables,
        }
        return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: float | None) -> float | None:
    """The number, or None if it is not finite, because JSON has no such numbers."""
    return None if value is None or not math.isfinite(value) else float(value)
