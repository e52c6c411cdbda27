"""Parts of an objective of text from the user's own file: planned, trained, interrupted, resumed, and read back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from flowgrpo.bench.measures import Silent
from flowgrpo.cli.app import app
from flowgrpo.configs.load import RecipeError, dump_recipe, load_recipe
from flowgrpo.training.checking import check
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session
from tests.training.test_text import numbers
from tests.training.text_runs import trainer_of

MINE = '''
"""My own parts."""

import torch
from typing import Annotated, Any
from flowgrpo.parts.choice import Of
from flowgrpo.parts.ranges import Given, Positive
from flowgrpo.training.text.token_objective import TokenObjective


def hinge(logp, ref_logp, lengths, pairs, *, margin: Positive = 1.0):
    """Mean log-ratios to the reference that lie apart by a margin."""
    score = (logp - ref_logp) / lengths
    return (margin - score[pairs[:, 0]] + score[pairs[:, 1]]).relu()


def square(logp, old_logp, *, most: float = 4.0):
    """Squared log-ratio to the policy that sampled, on top of a pull to be sure."""
    return ((logp - old_logp).square() - logp).clamp(max=most)


def sure(log_ratio, adv, logp, mask, *, entropy: Given[torch.Tensor], power: Positive = 1.0):
    """REINFORCE, with less weight where the policy was uncertain."""
    return -adv.view(len(adv), -1) * logp / (1 + entropy) ** power


def halved(gap, *, share: Positive = 0.5):
    """Half of every token's weight."""
    return torch.full_like(gap, share), torch.zeros_like(gap, dtype=torch.bool)


class Doubled(TokenObjective):
    """The objective of tokens, several times."""

    def __init__(
        self, recipe, policy, controls, *, times: Positive = 2.0, surrogate: Annotated[Any, Of("surrogate")] = "clip"
    ):
        super().__init__(recipe, policy, controls, surrogate=surrogate)
        self.times = times

    def _loss(self, experience, scored, rows):
        loss, metrics = super()._loss(experience, scored, rows)
        return self.times * loss, metrics
'''
LINES = {
    "answer loss": ["objective={name: answers, loss: {name: '%s:hinge', margin: 2.0}}"],
    "token penalty": ["penalties=[{name: '%s:square', weight: 0.5, most: 3.0}, {name: kl, weight: 0.1}]"],
    "surrogate": ["objective={surrogate: {name: '%s:sure', power: 0.5}}"],
    "correction": ["objective={correction: {name: '%s:halved', share: 0.25}}"],
    "text objective": ["objective={name: '%s:Doubled', times: 3}"],
}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("kind", LINES)
def test_a_run_is_planned_resumed_to_the_bit_and_read_back(
    small_text: list[str], tmp_path: Path, mine: Path, kind: str
) -> None:
    lines = [*small_text, *(line.replace("%s", str(mine)) for line in LINES[kind])]
    lines += ["optimizer.schedule=constant", "model.train=full"]
    planned = CliRunner().invoke(app, ["plan", "text", *lines], catch_exceptions=False)
    assert planned.exit_code == 0, planned.output
    recipe, short = load_recipe("text", lines), load_recipe("text", [*lines, "run.iterations=2"])
    Session(recipe, RunFolder.create(tmp_path / "whole", dump_recipe(recipe))).trainer(Silent()).train()
    Session(short, RunFolder.create(tmp_path / "broken", dump_recipe(short))).trainer(Silent()).train()
    for file in sorted((tmp_path / "broken" / "model").rglob("*")):
        file.unlink()
    (tmp_path / "broken" / "model").rmdir()
    again = Session(recipe, RunFolder(tmp_path / "broken")).trainer(Silent())
    again.resume()
    assert again.next_iteration == 2
    again.train()
    records = numbers(tmp_path / "whole")
    assert records == numbers(tmp_path / "broken")
    assert all(record["grad_norm"] > 0 for record in records[:-1])
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "broken"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert load_recipe(tmp_path / "whole" / "config.yaml") == recipe
    if kind == "token penalty":
        assert records[0]["penalty/square"] > 0
        assert records[0]["kl"] == 0


def test_a_plain_run_has_another_gradient(small_text: list[str], tmp_path: Path, mine: Path) -> None:
    """The value of an option of the user's own part reaches the loss."""
    norms = {}
    for name, line in {"plain": [], "three": LINES["text objective"], "quarter": LINES["correction"]}.items():
        lines = [*small_text, *(one.replace("%s", str(mine)) for one in line), "optimizer.max_grad_norm=1e9"]
        norms[name] = trainer_of(lines, tmp_path / name).iterate(0)["grad_norm"]
    assert norms["three"] == pytest.approx(3 * norms["plain"], rel=1e-4)
    assert norms["quarter"] == pytest.approx(norms["plain"] / 4, rel=1e-4)


@pytest.mark.parametrize(
    ("code", "lines", "message"),
    [
        (
            "def mine(logp, rewards): ...", "objective={name: answers, loss: '%s:mine'}",
            "answer loss mine asks for 'rewards' by a parameter before its `\\*`, and a run gives only logp",
        ),
        (
            "def mine(logp, power=2): ...", "penalties=[{name: '%s:mine', weight: 1}]",
            "token penalty mine asks for 'power' by a parameter before its `\\*`",
        ),
        (
            "from flowgrpo.parts.ranges import Given\n\ndef mine(r, a, l, m, *, elements: Given[int]): ...",
            "objective={surrogate: '%s:mine'}", "surrogate mine asks for 'elements', and a run of text gives units",
        ),
        (
            "from flowgrpo.parts.ranges import Given\n\ndef mine(r, a, l, m, *, units: Given[int]): ...",
            "objective={surrogate: '%s:mine'}", "surrogate mine works on the parts of completions, and nothing says",
        ),
    ],
)  # fmt: skip
def test_what_a_run_does_not_give_is_named(tmp_path: Path, code: str, lines: str, message: str) -> None:
    file = tmp_path / "file.py"
    file.write_text(code)
    with pytest.raises(RecipeError, match=message):
        load_recipe("text", [lines.replace("%s", str(file))])


@pytest.mark.parametrize(
    ("code", "line", "message"),
    [
        (
            "def mine(logp, pairs):\n    return logp.sum()", "objective={name: answers, loss: '%s:mine'}",
            r"answer loss mine returns a tensor of shape \(\) for three answers .*, and the shape must be \(1,\)",
        ),
        (
            "def mine(logp):\n    return logp.sum(1)", "penalties=[{name: '%s:mine', weight: 1}]",
            r"token penalty mine returns a tensor of shape \(2,\) .* return one value for each token",
        ),
        (
            "def mine(gap):\n    return gap, 1", "objective={correction: '%s:mine'}",
            r"correction mine returns 1 for two answers .* return None, or a weight and a bool for each token",
        ),
        (
            "def mine(logp, *, power=1.0):\n    raise ValueError(f'{power} is not even')",
            "penalties=[{name: '%s:mine', weight: 1}]", "1.0 is not even",
        ),
    ],
)  # fmt: skip
def test_what_is_returned_is_looked_at_before_a_model_is_loaded(
    tmp_path: Path, code: str, line: str, message: str
) -> None:
    file = tmp_path / "file.py"
    file.write_text(code)
    with pytest.raises(ValueError, match=message):
        check(load_recipe("text", [line.replace("%s", str(file))])).require()
