"""The pages agree with the code: the fields, columns, keys, links and figures that they name exist."""

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

import flowgrpo
from flowgrpo.bench.claims.evidence import Evidence
from flowgrpo.bench.claims.papers import CLAIMS
from flowgrpo.bench.claims.report import Results, write_report
from flowgrpo.bench.claims.results import Settings
from flowgrpo.configs.schema import Recipe
from flowgrpo.core.diagnostics import COLUMNS, summarise
from flowgrpo.core.objectives import policy_loss
from flowgrpo.rewards.registry import BUILTIN
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.training.tasks import FlowTask
from flowgrpo.training.text.text_task import TextTask

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(flowgrpo.__file__).parent
DOCS = ROOT / "docs"
PAGES = sorted({*ROOT.glob("*.md"), *DOCS.glob("*.md")})
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in _FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def cells(page: Path, heading: str, column: int) -> list[str]:
    """One column of the first table below a heading."""
    below = page.read_text(encoding="utf-8").split(f"# {heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\|\n)+", below, re.MULTILINE)
    assert table is not None
    rows = table.group().splitlines()[2:]
    return [re.split(r"(?<!\\)\|", row)[column + 1].strip() for row in rows]


def script(name: str):
    """A script of the docs as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference():
    return script("make_recipe_reference")


@pytest.fixture(scope="module")
def rows():
    return script("method_rows")


@pytest.fixture(scope="module")
def methods(rows):
    return script("make_method_index")  # which imports the rows by name


def test_method_index_is_what_the_code_says(methods):
    assert (DOCS / "methods.md").read_text(encoding="utf-8") == methods.page().rstrip() + "\n", "run `make docs`"


def test_method_index_gives_the_answer_to_every_claim(methods, monkeypatch, tmp_path):
    settings = Settings(tmp_path / "results")
    write_report(Results(settings, Evidence({}, {}, {}, {}), [], [], []), tmp_path)
    monkeypatch.setattr(methods, "CLAIMS", tmp_path / "claims.json")
    assert methods.page().count("Measured here: not measured.") == len(CLAIMS) > 10
    found = json.loads((tmp_path / "claims.json").read_text(encoding="utf-8"))
    found["runs"]["mixgrpo"] = {"seeds": [0, 1], "paint_gain": {"mean": -0.01}}
    found["times"]["mixgrpo"] = {"seconds": {"dance_grpo": [1.0, 1.0], "mixgrpo": [1.0, 1.0]}}
    found["times"]["mixgrpo-again"] = {"seconds": {"dance_grpo": [2.0, 2.0], "mixgrpo": [1.5, 1.58]}}
    found["rises"] = {"mixgrpo": {"before": 1.75, "after": 1.625, "error": 0.0125}, "dgpo": {"failed": "not finite"}}
    (tmp_path / "claims.json").write_text(json.dumps(found), encoding="utf-8")
    assert "| `mixgrpo` | 0.77 | 0, 1 | −0.010 | −0.125 ± 0.013 |\n" in methods.page()
    assert "| `dgpo` |" not in methods.page()
    assert sorted(name for method in methods.METHODS for name in method.claims) == sorted(c.name for c in CLAIMS)


def test_claims_of_the_method_tables_hold(rows):
    parts = rows.read_rows()
    assert rows.faults(parts) == []
    counted = {part.title[0]: len(part.rows) for part in parts if part.counted}
    assert counted == {"A": 30, "B": 23, "C": 20, "D": 26, "E": 28, "F": 6}
    assert sum(len(row.lines) for part in parts for row in part.rows) > 90


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"state": "planned"}, "use one of recipe, library, reward, not yet"),
        ({"state": "not yet"}, "state not yet needs note"),
        ({"state": "not yet", "note": "Much.", "library": ["core.kl"]}, "state not yet does not go with library"),
        ({"state": "recipe", "recipes": ["branchgrp"]}, "there is no recipe 'branchgrp'"),
        ({"state": "recipe", "both": [{"advantage": "gdpo"}], "arxiv": "9912.99999"}, "cites 9912.99999"),
        ({"state": "recipe", "text": [{"advantage": "betta"}]}, "there is no advantage 'betta'"),
        ({"state": "recipe", "text": [{"objective.surrogate": {"name": "sapo", "low": 1}}]}, "surrogate sapo has no"),
        ({"state": "recipe", "images": [{"rollout.tokens": 4}]}, "unknown key 'tokens'"),
        ({"state": "recipe", "text": [{"advantage.k": 1}]}, "advantage group has no option 'k'"),
        (
            {"state": "recipe", "text": [{"objective": {"name": "answers", "loss": {"name": "dpo", "tau": 0.5}}}]},
            "tau",
        ),
        ({"state": "recipe", "text": [{"rewards": [{"name": "gold"}]}]}, "the samples here are completions"),
        ({"state": "library", "library": ["core.trees.no_values"]}, "there is no core.trees.no_values"),
        ({"state": "library", "library": ["core.trees.node_values"]}, "used outside of core"),
        ({"state": "library", "library": ["core.pooled_ratios.sspo"]}, "used outside of core"),
        ({"state": "library", "library": ["core.baselines.beta_advantages"]}, "used outside of core"),
        (
            {"state": "library", "library": ["core.verifiers.forward_weights"], "arxiv": "2505.10978"},
            "does not cite 2505.10978",
        ),
        ({"state": "reward", "reward": "length", "text": [{"rewards": [{"name": "answer"}]}]}, "does not name"),
        ({"state": "reward", "reward": "prettiness"}, "no built-in reward"),
        ({"state": "reward", "reward": "length", "text": [{"rewards": [{"name": "length", "options": {"mode": "x"}}]}]},
         "length: mode is 'x'"),
    ],
)  # fmt: skip
def test_a_claim_that_does_not_hold_is_found(rows, row, fault):
    part = rows.Part("Z", (rows.Row("A paper", priority=1, **row),))
    assert fault in "\n".join(rows.faults([part]))


def test_method_tables_count_what_is_here(rows):
    listed = (
        rows.Row("one", "recipe", 1, recipes=["vgpo"]),
        rows.Row("two", "not yet", 1, note="All."),
        rows.Row("three", "reward", 2, reward="math"),
        rows.Row("four", "library", 2, library=["core.verifiers.forward_weights"]),
    )
    text = rows.counts([rows.Part("Z", listed), rows.Part("Y", (rows.Row("five", "recipe"),), counted=False)])
    assert text.startswith("Of 4 published methods with a priority, 3 are here")
    table = [re.findall(r"\d+", line.split("|", 2)[2]) for line in text.splitlines()[4:]]
    assert table == [list("211001"), list("220110"), list("431111")]


def test_lines_of_code_are_those_with_statements(methods):
    source = 'def f(x):\n    """Say.\n\n    More.\n    """\n    # why\n    y = (\n        x\n    )\n\n    return y\n'
    assert methods.code_lines(source) == 5


def test_recipe_reference_is_what_the_schema_says(reference):
    assert (DOCS / "recipes.md").read_text(encoding="utf-8") == reference.page(), "run `make docs`"


def test_recipe_reference_lists_every_key_with_its_default(reference):
    page = reference.page()

    def walk(value, prefix):
        for name, inner in value.items():
            key = f"{prefix}{name}"
            if isinstance(inner, dict) and "name" in inner:
                yield key, inner["name"]
            elif isinstance(inner, dict) and inner:
                yield from walk(inner, f"{key}.")
            elif name != "rewards":
                yield key, inner

    keys = dict(walk(Recipe(rewards=[{"name": "gold"}]).model_dump(mode="json"), ""))
    assert {"optimizer.ema.decay", "sampler.plan", "model.lora.rank"} <= set(keys)
    for key, default in keys.items():
        row = re.search(rf"^\| `{re.escape(key)}` \| .* \| `(.*?)` \| .+ \|$", page, re.MULTILINE)
        assert row is not None, key
        assert yaml.safe_load(row.group(1)) == default or float(row.group(1)) == default, key
    for name in ("name", "weight", "label", "options"):
        assert f"| `rewards[].{name}` |" in page


def test_recipe_reference_refuses_a_key_without_a_meaning_and_a_note_without_a_key(reference, monkeypatch):
    monkeypatch.setitem(reference.NOTES, "sampler.colour", "Blue.")
    with pytest.raises(ValueError, match=r"sampler\.colour"):
        reference.page()
    monkeypatch.undo()
    monkeypatch.delitem(reference.NOTES, "run.seed")
    with pytest.raises(ValueError, match=r"run\.seed"):
        reference.page()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_pages_are_found():
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "architecture.md", "recipes.md", "rewards.md"} <= {p.name for p in PAGES}


def test_recipe_examples_name_rewards_that_the_page_defines():
    page = DOCS / "rewards.md"
    written = "".join(blocks(page, "python"))
    for example in blocks(page, "yaml"):
        entries = yaml.safe_load(example)["rewards"]
        names = [entry["name"] for entry in entries]
        names += [entry["options"]["judge"] for entry in entries if "judge" in entry.get("options", {})]
        for written_name in names:
            if written_name in BUILTIN:
                continue
            file, name = written_name.removeprefix("./").split(":")
            assert f"# {file}\n" in written
            assert re.search(rf"^(def|class) {name}\b", written, re.MULTILINE)


def test_built_in_rewards_are_listed():
    assert {name.strip("`") for name in cells(DOCS / "rewards.md", "Names", 0)} >= {"word"}
    text = (DOCS / "rewards.md").read_text(encoding="utf-8")
    for name in BUILTIN:
        assert f"| `{name}` |" in text


def test_metric_fields_are_those_of_the_code():
    listed = " ".join(cells(DOCS / "architecture.md", "Fields of `metrics.jsonl`", 0))
    fields = set(re.findall(r"`([^`]+)`", listed))
    rows = torch.tensor([[0.1], [-0.1]], requires_grad=True)
    _, metrics = policy_loss(
        rows, torch.zeros(2, 1), torch.tensor([1.0, -1.0]), weight=torch.ones(2, 1), penalty=torch.ones(2, 1)
    )
    assert {name for name in metrics if name != "ratio"} <= fields
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    for name in summarise(torch.ones(1, 2, COLUMNS)):
        stem = re.sub("_(pos|neg)$", "", name)
        assert f"`{stem}`" in text, name
    for part in (*FlowTask.clock_parts, *TextTask.clock_parts):
        assert f"`{part}`" in text, part


def test_sample_fields_are_those_of_the_code():
    listed = " ".join(cells(DOCS / "architecture.md", "Fields of `samples/index.jsonl`", 0))
    fields = set(re.findall(r"`([^`]+)`", listed))
    empty = RewardBatch(torch.zeros(1, 1), ("r",), torch.ones(1), {}, {}, {})
    assert set(empty.record(0)) <= fields


def test_packages_import_what_the_table_says():
    page = DOCS / "architecture.md"
    names = [name.strip("`") for name in cells(page, "Layout", 0)]
    allowed = {
        name: set(re.findall(r"`(\w+)`", cell)) for name, cell in zip(names, cells(page, "Layout", 2), strict=True)
    }
    packages = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert packages == set(allowed)
    for name in packages:
        for file in (PACKAGE / name).glob("*.py"):
            extra = imported_siblings(file) - allowed[name] - {name}
            assert not extra, f"{file.relative_to(PACKAGE)} imports {', '.join(sorted(extra))}"


def imported_siblings(file: Path) -> set[str]:
    """Sub-packages of flowgrpo that a module of another sub-package imports, at any place in the module."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 2:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("flowgrpo."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("flowgrpo.")}
    return found


def test_changelog_is_about_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == flowgrpo.__version__
