"""The report on the papers' claims: figures, the page, and the command."""

import dataclasses
import json
import math
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowgrpo.bench.claims.charts import CHARTS
from flowgrpo.bench.claims.dots import Dots, draw_dots
from flowgrpo.bench.claims.evidence import Evidence, Measure
from flowgrpo.bench.claims.gather import choose, gather, settings_of
from flowgrpo.bench.claims.intervals import Interval
from flowgrpo.bench.claims.line_charts import Panel, Series, draw, ticks
from flowgrpo.bench.claims.papers import CLAIMS
from flowgrpo.bench.claims.report import Results, machines, write_report
from flowgrpo.bench.claims.results import Settings
from flowgrpo.bench.claims.timings import FAMILIES
from flowgrpo.bench.claims.trainings import DENSE, PAINT, jobs
from flowgrpo.cli.app import app
from flowgrpo.configs.load import recipe_names
from tests.bench.made_results import evidence, made

SVG = "{http://www.w3.org/2000/svg}"


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def texts(root: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in root.iter(f"{SVG}text")]


# -- figures -----------------------------------------------------------------------------------------------------------


def test_a_figure_is_well_formed_and_says_what_is_on_it() -> None:
    series = [Series("a < b & c", [0, 1, 2], [1.0, None, 3.0]), Series("seed", [0, 2], [1.0, math.nan], faint=True)]
    root = parsed(draw('"title"', [Panel("left", "x", series), Panel("right", "x", [])]))
    said = texts(root)
    assert {'"title"', "left", "right", "a < b & c", "nothing measured", "x"} <= set(said)
    lines = [node.attrib["points"] for node in root.iter(f"{SVG}polyline")]
    assert [len(points.split()) for points in lines] == [2, 1]
    assert "prefers-color-scheme:dark" in draw("x", [])


def test_a_line_goes_where_its_values_are() -> None:
    root = parsed(draw("t", [Panel("p", "x", [Series("s", [0, 1, 2], [0.0, 5.0, 10.0])])]))
    (line,) = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert points[1] == pytest.approx([(a + b) / 2 for a, b in zip(points[0], points[2])], abs=0.06)
    assert points[0][0] < points[2][0]
    assert points[0][1] > points[2][1]


def test_no_two_of_many_lines_look_alike() -> None:
    series = [Series(f"s{k}", [0, 1], [0.0, float(k)]) for k in range(20)]
    root = parsed(draw("t", [Panel("p", "x", series)]))
    looks = [node.attrib["class"] for node in root.iter(f"{SVG}polyline")]
    assert len(set(looks)) == 20
    legend = [node.attrib["class"] for node in root.iter(f"{SVG}line") if node.attrib["class"] != "grid"]
    assert legend == looks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (-1.1, 1.1, ["−1.0", "−0.5", "0.0", "0.5", "1.0"]),
        (0.0, 4e5, ["0", "100k", "200k", "300k", "400k"]),
        (0.0, 4e7, ["0", "1e+07", "2e+07", "3e+07", "4e+07"]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[str]) -> None:
    assert [text for _, text in ticks(low, high)] == expected


def test_dots_lie_on_scales_of_their_own() -> None:
    time = Measure("time < 1", Interval(0.53, 0.50, 0.56, 5), 0.56, False, 0.51)
    gain = Measure("gain", Interval(1.4, -math.inf, math.inf, 1), 0.8, True, None, None)
    root = parsed(draw_dots([Dots("A", time, "reproduced"), Dots("B", gain, "undecided")]))
    said = texts(root)
    assert {"A", "B", "time < 1", "0.53 [0.50, 0.56]", "1.40", "reproduced", "not reproduced"} <= set(said)
    # The first three circles and the first diamond are the legend.
    circles = list(root.iter(f"{SVG}circle"))[3:]
    assert [node.attrib["class"] for node in circles] == ["v0", "v2"]
    diamonds = list(root.iter(f"{SVG}path"))[1:]
    assert len(diamonds) == 1
    bars = {node.attrib["class"]: node.attrib for node in root.iter(f"{SVG}line") if "bar" in node.attrib["class"]}
    low, high = (float(bars["bar v0"][key]) for key in ("x1", "x2"))
    assert low < float(circles[0].attrib["cx"]) < high
    # The claimed side of a time is to the left of its bound, and the side of a gain to the right of its bound.
    good = [node.attrib for node in root.iter(f"{SVG}rect")][1:]
    assert float(good[0]["x"]) + float(good[0]["width"]) == pytest.approx(high, abs=0.2)
    assert float(good[1]["x"]) < float(circles[1].attrib["cx"])


# -- the report --------------------------------------------------------------------------------------------------------

LEVEL = [[0.4, 0.5], [0.4, 0.51], [0.4, 0.49]]


def whole() -> Evidence:
    """Results of everything that a claim needs."""
    labels = {label for c in CLAIMS for label in c.runs}
    shares: dict[str, dict[str, tuple[float, ...]]] = {
        family: {FAMILIES[family][0]: (1.0, 1.0)} for family in ("mixgrpo", "branchgrpo")
    }
    found = evidence(dict.fromkeys(sorted(labels), LEVEL), shares)
    kernel = [{"eta": e, "diversity": [e, e + 0.01], DENSE: [0.5, 0.4], "proxy": [0.1, 0.2]} for e in (0.1, 0.3)]
    variances = {"none": [3.0, 2.0], "mean": [1.0, 1.0], "loo": [1.5, 1.4]}
    norms = [[2.0, 1.9, 1.8, 1.6, 1.6]] * 2
    probes: dict[str, dict[str, Any]] = {
        "exploration": {"kernels": dict.fromkeys(("flow_sde", "sage"), kernel)},
        "gradient_variance": {"squared": variances, "mean_squared": dict.fromkeys(variances, 0.1)},
        "gradient_spread": {"by_step": {"plain": [[1.0, 4.0], [1.0, 5.0]], "guard": [[1.0, 1.1], [1.0, 1.0]]}},
        "vanishing": {"shrunk": [1.0, 0.1, 0.01, 0.001, 0.0], "value": norms, "relative": norms},
    }
    head = made("probe", [0.0, 0.0])
    return dataclasses.replace(found, probes={name: head | probe for name, probe in probes.items()})


def test_a_report_answers_every_claim(tmp_path: Path) -> None:
    settings, results = Settings(Path("runs/claims"), overrides=("optimizer.learning_rate=1e-3",)), whole()
    used = [run for runs in results.runs.values() for run in runs.values()]
    given = Results(settings, results, used, ["old.json"], list(results.runs), embedded=["sage_grpo"])
    page = write_report(given, tmp_path / "out").read_text()
    data = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert [c["name"] for c in data["claims"]] == [c.name for c in CLAIMS] == list(CHARTS)
    assert "not measured" not in {c["verdict"] for c in data["claims"]}
    assert data["unused"] == ["old.json"]
    assert data["command"] == "flowgrpo bench claims optimizer.learning_rate=1e-3 --seeds 0,1,2 --scale 1 --budget 1"
    assert data["hardware"] == ["1 thread(s) on 2 cores of a cpu, torch 2"]
    row = data["runs"]["mixgrpo"]
    assert row[PAINT]["mean"] == pytest.approx(0.5)
    assert row[PAINT]["high"] == pytest.approx(0.5 + 2.484138 * 0.01, abs=1e-6)
    assert set(data["times"]) == set(FAMILIES)
    # 2 s for each of ten iterations.
    assert f"The {len(used)} runs trained for {len(used) * 20 / 60:.0f} minutes in all" in page
    assert "run as they are embedded: sage_grpo." in page
    # One figure and one table come before everything else.
    opening = page.partition("\n## ")[0]
    assert opening.index("(claims/all.svg)") < opening.index("| paper | claim of the paper | measured here |")
    assert sum(line.startswith("| [") for line in opening.splitlines()) == len(CLAIMS)
    assert "time, of DanceGRPO's: 1.00 [1.00, 1.00] (holds if ≤ 0.56; claimed 0.51)" in opening
    for c in CLAIMS:
        assert f"## {c.paper}: {c.name}\n" in page
        assert texts(parsed((tmp_path / "out" / "claims" / f"{c.name}.svg").read_text()))
    said = texts(parsed((tmp_path / "out" / "claims" / "all.svg").read_text()))
    assert {"MixGRPO", "BranchGRPO", "GRPO-Guard", "LOOP"} <= set(said)


def test_what_is_undecided_says_what_it_would_take(tmp_path: Path) -> None:
    # Gains of 0.05, 0.10 and 0.15 against 0.10: mean of ours − 0.8 theirs 0.02, deviation 0.05; 27 seeds decide.
    runs = {"mixgrpo": [[0.4, 0.45], [0.4, 0.5], [0.4, 0.55]], "dance_grpo": [[0.4, 0.5]] * 3}
    results = evidence(runs, {"mixgrpo": {"mixgrpo": (0.5, 0.5)}})
    page = write_report(Results(Settings(tmp_path), results, [], []), tmp_path / "out").read_text()
    assert "*Undecided; by the present spread, about 24 more seeds decide it.*" in page
    single = evidence({label: curves[:1] for label, curves in runs.items()}, {"mixgrpo": {"mixgrpo": (0.5, 0.5)}})
    page = write_report(Results(Settings(tmp_path), single, [], []), tmp_path / "out").read_text()
    assert "*Undecided; one value decides nothing.*" in page


def test_an_effect_that_is_too_small_to_matter_is_refuted_by_a_rule_that_the_page_has(tmp_path: Path) -> None:
    scores = [[0.4, 0.5], [0.4, 0.51], [0.4, 0.49]]
    # Differences of 0.000, 0.007 and 0.008: mean 0.005, deviation 0.0044, so the high end is 0.0158.
    higher = [[0.4, end + more] for (_, end), more in zip(scores, (0.0, 0.007, 0.008))]
    results = evidence({"pref_grpo+proxy": higher, "pref_grpo+pointwise": scores})
    page = write_report(Results(Settings(tmp_path), results, [], []), tmp_path / "out").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| [Pref-GRPO"))
    assert "0.005 [−0.006, 0.016] (holds if ≥ 0, refuted if < 0.02) | **not reproduced** |" in row
    assert "minus its scores: +0.005 [−0.006, +0.016]. *Does not hold; refuted if < 0.02.*\n" in page
    # What holds is not said to be refuted by anything.
    better = [[0.4, end + 0.1] for _, end in scores]
    results = evidence({"pref_grpo+proxy": better, "pref_grpo+pointwise": scores})
    page = write_report(Results(Settings(tmp_path), results, [], []), tmp_path / "out").read_text()
    assert "refuted if <" not in page


def test_links_to_the_claims_lead_to_their_headings(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "results")
    page = write_report(Results(settings, Evidence({}, {}, {}, {}), [], []), tmp_path / "out").read_text()
    assert page.count("**not measured**") == len(CLAIMS)
    assert not (tmp_path / "out" / "claims" / "mixgrpo.svg").exists()
    for c in CLAIMS:
        heading = f"{c.paper}: {c.name}".lower()
        anchor = "".join(ch for ch in heading if ch.isalnum() or ch in "- ").replace(" ", "-")
        assert f"(#{anchor})" in page


def test_two_machines_are_both_named() -> None:
    one = made("x", [0.0, 0.0])
    gpu = made("x", [0.0, 0.0], hardware={**one["hardware"], "gpu": "a gpu"})
    assert machines([one, one, gpu]) == ["1 thread(s) on 2 cores of a cpu, torch 2", "a gpu, torch 2"]


# -- the command -------------------------------------------------------------------------------------------------------


def test_words_of_the_command() -> None:
    words = ["mixgrpo", "sampler.steps=5", "tempflow"]
    settings, names = settings_of(Path("r"), words, "0, 2,2", 0.5, True, 2.0)
    assert settings == Settings(Path("r"), (0, 2), 0.5, ("sampler.steps=5",), True, 2.0)
    assert names == ["mixgrpo", "tempflow"]


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: settings_of(Path("r"), [], "0;1", 1.0, False), "write numbers with commas"),
        (lambda: settings_of(Path("r"), [], "", 1.0, False), "write numbers with commas"),
        (lambda: settings_of(Path("r"), [], "0", 0.0, False), "use a number above 0"),
        (lambda: settings_of(Path("r"), [], "0", math.inf, False), "--scale is inf; use a number above 0 and at most"),
        (lambda: settings_of(Path("r"), [], "0", math.nan, False), "--scale is nan; use a number above 0 and at most"),
        (lambda: settings_of(Path("r"), [], "0", 1e308, False), "use a number above 0 and at most 1,000,000"),
        (lambda: settings_of(Path("r"), [], "0", 1.0, False, -1.0), "use a number of hours"),
        (lambda: settings_of(Path("r"), [], "0", 1.0, False, math.nan), "use a number of hours"),
        (lambda: choose(["mixgrp"]), "no claim or recipe 'mixgrp'"),
    ],
)
def test_what_is_wrong_with_the_command_is_said(make: Callable[[], Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        make()


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("claims", "run.seed=5", "run.seed=5: `flowgrpo bench claims` itself settles run.seed; give the seeds with --"),
        ("claims", "run.iterations=5", "itself settles run.iterations; give the length of the runs with --scale"),
        ("claims", "run={keep: 1}", "settles run.seed; give the seeds with --seeds, and set other keys of run one by"),
        ("claims", "rewards.paint.weight=2", "itself settles rewards; runs train on the rewards that the claims"),
        ("claims", "data.heldout=own.txt", "all figures are of the prompts scenes:test; leave it out"),
        ("claims", "evaluate.rewards=[{name: gold}]", "itself settles evaluate.rewards"),
        (
            "race",
            "run.seed=5",
            "run.seed=5: `flowgrpo bench race` itself settles run.seed; give the seeds with --seeds",
        ),
        ("race", "run.iterations=5", "give the length of the runs with --scale; default runs as it is"),
        ("race", "run.checkpoint_every=5", "itself settles run; leave it out"),
        ("race", "evaluate.every=1", "itself settles evaluate.every; leave it out; evaluate.prompts can be set"),
        ("race", "optimizer.learning_rate=0.1", "give a recipe its learning rate as RECIPE=RATE, such as awm=0.0006"),
    ],
)
def test_an_override_that_would_falsify_the_report_is_refused(
    name: str, word: str, message: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["bench", name, word, "--report-only", "--results", str(tmp_path / "results")])
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("name", ["claims", "race"])
def test_other_overrides_are_taken(name: str, tmp_path: Path) -> None:
    words = ["evaluate.prompts=2", "rollout.decode_batch=4", "data.train=own.txt"]
    words += ["run.checkpoint_every=1", "evaluate.steps=4"] if name == "claims" else []
    done = CliRunner().invoke(app, ["bench", name, *words, "--report-only", "--results", str(tmp_path / "results")])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("results", [Path("elsewhere/results"), Path("/data/my results")])
def test_the_command_of_the_report_names_its_results(tmp_path: Path, results: Path) -> None:
    text = write_report(Results(Settings(results), Evidence({}, {}, {}, {}), [], []), tmp_path).read_text()
    line = f"flowgrpo bench claims --seeds 0,1,2 --scale 1 --budget 1 --results {shlex.quote(str(results))}"
    assert f"\n`{line}`\n" in text
    assert json.loads((tmp_path / "claims.json").read_text())["command"] == line


def test_names_are_claims_or_recipes_for_a_short_run() -> None:
    chosen, methods = choose(["tempflow", "awm"])
    assert ([claim.name for claim in chosen], methods) == (["tempflow"], ["awm"])
    chosen, methods = choose(["mixgrpo"])
    assert ([claim.name for claim in chosen], methods) == (["mixgrpo"], ["mixgrpo"])
    chosen, methods = choose([])
    assert (chosen, methods) == (list(CLAIMS), list(recipe_names("images")))


@pytest.mark.slow
def test_the_results_on_record_are_found_and_make_the_report_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipes in the results follow the present schema; otherwise everything would be measured again."""
    # The page names the folder of the results as its command does, from the root of the repository.
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    record = Path("docs") / "benchmarks"
    settings = Settings(record / "claims", any_code=True)
    found = gather(settings)
    assert (len(found.used), list(found.unused)) == (len(list(settings.results.glob("*.json"))), [])
    assert set(found.labels) == set(jobs())
    # Rewards have no part in the losses of the first two, and the others need rewards with a gradient.
    assert set(found.rises) == set(recipe_names("images")) - {
        "diffusion_opd", "d_opsd", "draft", "refl", "drtune", "direct_align", "diffusion_opsd"
    }  # fmt: skip
    assert set(found.evidence.times) == set(FAMILIES)
    text = write_report(found, tmp_path).read_text(encoding="utf-8")
    lines, known = (
        [line for line in page.splitlines() if not line.startswith(("Run on: ", "These results come from other code"))]
        for page in (text, (record / "claims.md").read_text(encoding="utf-8"))
    )
    assert lines == known
