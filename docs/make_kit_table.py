"""Writes docs/benchmarks/kit.md: what the reward author's kit finds in every built-in reward, and in bad rewards.

Run it from anywhere: `python docs/make_kit_table.py`. It needs the packages of the tests, takes some minutes on one
core, and downloads nothing. With names of rewards, it only prints the findings of these rewards, and writes nothing.
The instances and the material come from kit_instances.py.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flowgrpo.kit.check import CheckPlan, check_on
from flowgrpo.kit.contract import check_contract
from flowgrpo.kit.findings import NOTE, SEVERITIES, Finding, Report
from flowgrpo.kit.material import Material
from flowgrpo.kit.trial import Trial
from flowgrpo.rewards.base import MissingDependency, RewardSpec
from flowgrpo.training.folder.run_folder import write_text

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "kit.md"
CULPRITS = ROOT / "tests" / "kit" / "culprits.py"
LONGEST = 400

OF_WEIGHTS = frozenset(
    {"noise", "degenerate", "constant", "saturated", "flat-groups", "agreement", "resize", "format", "range"}
)
"""Codes of findings about what a reward prefers; they say nothing about a reward with random weights."""

PLAIN = ("cost", "noise")
"""Codes of notes that every reward gets."""

CRIMES: dict[str, tuple[str, str]] = {
    "noisy": ("adds random numbers of the global generator", "random"),
    "OwnNoise": ("adds random numbers of its own generator", "random"),
    "Drifting": ("grows with every call", "state"),
    "normalised": ("standardises over the samples of a call", "batch"),
    "numbered": ("adds the sample's place in the call", "order"),
    "Rounded": ("compares the group, and lets the sample's place decide between equal scores", "order"),
    "contrast": ("divides 0 by 0 for a picture of one value", "blank"),
    "doubling": ("writes into its pictures", "mutation"),
    "spoiling": ("writes into the columns of the prompts", "columns"),
    "Holding": ("turns gradients on", "gradients"),
    "Keeping": ("keeps the graph of its last call", "gradients"),
    "Hoarding": ("keeps all pictures that it has seen", "memory"),
    "corner": ("looks at the first 32 pixels, whatever the size", "resize"),
    "squeezed": ("returns a number, not a list, for a single sample", "scores"),
    "columnar": ("returns a column", "scores"),
    "halved": ("returns bfloat16", "dtype"),
    "offset": ("adds 100,000", "range"),
    "ends": ("divides by the number of words", "no-prompt"),
    "short_prompts": ("raises for a long prompt", "long-prompt"),
    "of_64": ("takes 64×64 pixels only", "tiny"),
    "spaced": ("scores a completion by its first character, even if that is a space", "whitespace"),
    "per_word": ("divides by the number of words of a completion", "blank"),
}
"""Bad reward -> what it does, and the finding that convicts it."""
BLAMELESS = {"brightness": "mean brightness", "Unlike": "compares the group, and says so"}

INTRODUCTION = """\
# The kit on every reward

<!-- Written by docs/make_kit_table.py. Change that, or the rewards, not this page. -->

[`flowgrpo rewards check`](../reward_kit.md#check), run on every built-in reward and on rewards that are bad on purpose.
`python docs/make_kit_table.py` writes this page again. Faults and warnings are the findings of the kit, and the verdict
is the first line of its report.

The material is small:

- *scenes*: 4 held-out prompts × 6 samples of the embedded model, 64×64 pixels. With *red stars*, all prompts ask for 4
  red stars. With *short prompts*, 8 of the samples have the prompts "a cat" and "a dog".
  With *questions*, each prompt has one multiple-choice question, and with *a reference*, each has a reference image.
- *videos*: 4 frames each, made from these 8 samples; every frame moves the sample by one pixel.
- *sounds*: 4 prompts × 6 drawn sounds of a second, in two channels.
- *pages*: 8 drawn pages with a word, 256×96 pixels.
- *sums*: 4 held-out prompts × 6 completions of the embedded language model.
- *answers*, *worked*, *called*, *programs*, *objects*, *queries*: 8 written completions each.

The column of weights says how a reward was loaded:

- *none*: the reward has no weights. *shipped*: the weights come with flowgrpo. *of its package*: they come with
  RapidOCR.
- *tiny random*: a tiny network of the real class, with random weights. Its preferences mean nothing, so findings about
  preferences have the mark † and are no judgement of the reward. The check tests the contract: shape, order, batch,
  randomness, sizes, blanks, prompts, gradients, non-finite values.
- *stub server*: a server that answers by the picture's brightness, in the form that the judge asks for. Its preferences
  (†) are the stub's. So is the finding `prompt`, because the stub does not read the prompt.
- `remote` asks a server with the reward `proxy`.

Notes are figures, and properties that may be intended. `cost` and `noise` are not listed, because nearly every reward
gets them. The other notes mean:

- `degenerate`: a blank, noisy or chequered picture scores above every sample.
- `prompt`: the words of the prompt do not matter, or the last words of a very long prompt do not.
- `no-prompt`: the reward does not apply without a prompt.
- `flat-groups`: in some groups all scores are equal.

The first run of this check had one more finding for `code`: programs with a space in front failed all their tests, and
language models often write such programs. This fault is mended.
"""

BAD = """\
## Bad rewards

These rewards are in `tests/kit/culprits.py`. Each has one fault, except the last two, which have none. The pictures are
4 prompts × 6 drawn scenes, and every second scene shows something else than it should. The completions are *answers*.

The kit finds a fault only if the material shows it. On *scenes*, `corner` passes: at twice the size, 75 % of the pairs
keep their order, and only a smaller share gives a warning.
"""


def main() -> None:
    """Check all rewards and write the page; with names on the command line, check only these, and write no page."""
    from flowgrpo.training.model_paths import quiet_libraries

    sys.path.insert(0, str(ROOT))
    from kit_instances import all_material, makers

    quiet_libraries()
    made, chosen = makers(), sys.argv[1:]
    good, bad = ([name for name in names if name in chosen or not chosen] for names in (made, [*CRIMES, *BLAMELESS]))
    if unknown := set(chosen) - {*good, *bad}:
        sys.exit(f"no reward {', '.join(sorted(unknown))}; use {', '.join([*made, *CRIMES, *BLAMELESS])}")
    material = all_material()
    rows, said = [], []
    for name in good:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
            case = made[name](Path(folder), ending)
            spec = RewardSpec(case.name, options=case.options)
            kind = case.material or "scenes"
            report = examined(spec, kind, material[kind], contract_only=kind == "videos")
        nothing = case.weights in ("tiny random", "stub server")
        rows.append([f"`{name}`", case.weights, case.material or "none", *cells(report, nothing)])
        said += sentences(name, report, nothing)
    convicted = [culprit(name, material) for name in bad]
    if not chosen:
        write_text(PAGE, page(rows, said, convicted))
        print(f"wrote {PAGE}")


def examined(spec: RewardSpec, kind: str, material: Material, *, contract_only: bool = False) -> Report | str:
    """The kit's report on a reward, or the reason why there is none."""
    print(f"{spec.name} …", flush=True)
    try:
        trial = Trial(spec)
    except (ValueError, MissingDependency) as error:
        return str(error)
    try:
        report = Report(trial.name, trial.task)
        if contract_only:
            check_contract(trial, material.few(), report)
            report.skipped["edges, versions"] = "the kit has pictures for these, and no videos"
        else:
            check_on(trial, {kind: material}, CheckPlan(), report)
    finally:
        trial.close()
    print(report.text(), flush=True)
    return report


def culprit(name: str, material: dict[str, Material]) -> list[str]:
    """The row of a bad reward.

    Raises:
        ValueError: the kit did not find the fault, or found a fault in a reward that has none.
    """
    kind = "answers" if name in ("spaced", "per_word") else "drawn"
    report = examined(RewardSpec(f"{CULPRITS}:{name}"), kind, material[kind])
    if isinstance(report, str):
        raise ValueError(f"{name}: {report}")
    crime, code = CRIMES.get(name, (BLAMELESS.get(name, ""), ""))
    if (code and code not in report.convictions) or (not code and report.convictions):
        raise ValueError(f"{name} was convicted of {', '.join(sorted(report.convictions)) or 'nothing'}, not of {code}")
    return [f"`{name}`", crime, f"`{code}`" if code else "nothing", report.verdict, listed(grave(report), False)]


def cells(report: Report | str, nothing: bool) -> list[str]:
    """Verdict, faults and warnings, and notes of a reward."""
    if not isinstance(report, Report):
        return ["not checked", _cell(report), ""]
    notes = [one for one in report.findings if one.severity == NOTE and one.code not in PLAIN]
    return [report.verdict, listed(grave(report), nothing), listed(notes, nothing).replace(" note", "")]


def listed(found: list[Finding], nothing: bool) -> str:
    """Findings as a cell; findings that say nothing about the reward have a mark."""
    each = {f"`{one.code}` {one.severity}{'†' * (nothing and of_weights(one))}": None for one in found}
    return ", ".join(each) or "none"


def sentences(name: str, report: Report | str, nothing: bool) -> list[str]:
    """Lines on a reward: one line for each fault, each warning and each check that was left out."""
    if isinstance(report, str):
        return []
    lines = [
        f"- `{name}`, `{one.code}`: {_cell(' '.join(one.seen.split()))[:LONGEST]}"
        for one in grave(report)
        if not (nothing and of_weights(one))
    ]
    return lines + [f"- `{name}`, left out, {check}: {_cell(why)}" for check, why in report.skipped.items()]


def grave(report: Report) -> list[Finding]:
    """Faults, then warnings."""
    return [one for severity in SEVERITIES for one in report.findings if one.severity == severity != NOTE]


def of_weights(finding: Finding) -> bool:
    """Whether a finding is about what the weights prefer; `dtype` is, if a version of the samples changes the order."""
    return finding.code in OF_WEIGHTS or (finding.code == "dtype" and finding.seen.startswith("“"))


def page(rows: list[list[str]], said: list[str], bad: list[list[str]]) -> str:
    """The whole page."""
    return "\n".join(
        [
            INTRODUCTION,
            "## Built-in rewards",
            "",
            *_table(["reward", "weights", "material", "verdict", "faults and warnings", "notes"], rows),
            "",
            "What was seen, without the findings marked †, and what was left out:",
            "",
            *said,
            "",
            BAD,
            *_table(["reward", "what it does", "convicted of", "verdict", "faults and warnings"], bad),
            "",
        ]
    )


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines: list[Any] = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _cell(text: str) -> str:
    return text.replace(f"{ROOT}/", "").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()
