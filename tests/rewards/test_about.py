"""What `flowgrpo rewards show` says of a reward."""

from pathlib import Path

import pytest

from flowgrpo.rewards.about import about
from flowgrpo.rewards.registry import BUILTIN
from tests.conftest import Command

OWN = '''
def brightness(images, prompts, *, target, mood=None, floor: float = 0.5, **columns):
    """Nearness of the mean brightness to the column `target` (arXiv 2505.05470).

    Args:
        floor: least score.
    """
    return [0.0 for _ in prompts]


class Bare:
    def __call__(self, completions, prompts):
        return [0.0 for _ in prompts]
'''


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_every_reward_of_the_package_tells_what_it_scores_and_what_each_option_does(name: str) -> None:
    first, *others = about(name)
    assert first.startswith(f"{name}: ")
    assert len(first) > len(name) + 20
    told = [line for line in others if not line.startswith(("  arXiv", "  scores", "  needs", "  reads", "  It has"))]
    # Every option of a class has a text. The first sentence explains the options of functions.
    unexplained = [line for line in told if line.endswith(".") and line.count(". ") == 0]
    assert [line.split(":")[0].strip() for line in unexplained] in ([], ["quality"])


def test_a_function_has_columns_and_options(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    assert about(f"{tmp_path}/own.py:brightness") == [
        f"{tmp_path}/own.py:brightness: Nearness of the mean brightness to the column `target` (arXiv 2505.05470).",
        "  arXiv 2505.05470",
        "  scores images",
        "  needs the column target",
        "  reads, if there, the column mood",
        "  floor: float, 0.5. least score.",
    ]
    assert about(f"{tmp_path}/own.py:Bare")[1:] == ["  scores completions", "  It has no options."]


def test_the_command_shows_several_and_refuses_unknown_ones(command: Command) -> None:
    status, output, errors = command("rewards", "show", "gold", "aesthetic")
    assert (status, errors) == (0, "")
    assert "gold: Verifier of the embedded scenes" in output
    assert "\n\naesthetic: Beauty" in output
    assert "head: str, required. path of" in output
    assert command("rewards", "show", "{name: gold, options: {dense: true}}", "aesthetic") == (0, output, "")
    status, _, errors = command("rewards", "show", "golf")
    assert status == 1
    assert "did you mean 'gold'" in errors


def test_a_missing_option_is_told_with_its_meaning(command: Command) -> None:
    status, _, errors = command("plan", "rewards=[{name: aesthetic}]")
    assert status == 1
    assert (
        "reward 'aesthetic' needs the option head; write `options: {head: …}` beside its name. head: path of" in errors
    )
