"""A plan and a window from a file of a user's."""

from pathlib import Path

import pytest

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.parts.traits import OFFERED
from flowgrpo.training.checking import check
from flowgrpo.training.planning import forecast, levels_of, planner
from tests.parts.own_parts import IMAGES, Command, same_when_resumed, write_part

CODE = '''
from typing import Annotated

from flowgrpo.parts.choice import Of
from flowgrpo.parts.ranges import Several
from flowgrpo.samplers.plans import Plan, StepPlan
from flowgrpo.samplers.windows import Window, frozen


def fork(setting, iteration, *, width: Several = 2, window: Annotated[Window, Of("window")] = frozen):
    """Every noise of the group splits at each step of a window, and nothing else is random.

    Args:
        width: Children at a split.
        window: Where they split.
    """
    splits = setting.steps(window, iteration)
    steps = [
        StepPlan(setting.kernel, children=width, trained=True) if i in splits else StepPlan(solver=setting.solver)
        for i in range(setting.num_steps)
    ]
    return Plan(setting.sigmas, tuple(steps), roots=setting.group)


def pair(iteration, num_steps, seed, *, gap: int = 1):
    """Two steps, which move with the iteration."""
    first = (seed + iteration) % (num_steps - 1 - gap)
    return [first, first + gap]
'''


OFFERING = '''
from flowgrpo.parts.traits import offers
from flowgrpo.samplers.plans import branch_plan


def late(setting, iteration, *, at: int = 4):
    """Images that share all steps before one late step.

    Args:
        at: Where the images part.
    """
    return branch_plan(setting.sigmas, [at], setting.kernel, width=setting.group)


def silent(setting, iteration):
    """The same plan, which does not say what it offers."""
    return late(setting, iteration)


offers("tree", "splits")(late)
'''


@pytest.mark.slow
def test_a_run_with_a_plan_of_ones_own_resumes_to_the_last_bit(tmp_path: Path):
    mine = write_part(tmp_path, CODE)
    chosen = f"sampler.plan={{name: '{mine}:fork', window: {{name: '{mine}:pair', gap: 2}}}}"
    again = same_when_resumed("mixgrpo", [*IMAGES, "rollout.group=2", chosen], tmp_path)
    assert again.task == "images"
    plan = again.sampler.plan
    assert (plan.short, plan["width"], plan["window"].short, plan["window"]["gap"]) == ("fork", 2, "pair", 2)
    plan_for = planner(again, levels_of(again))
    assert [plan_for(k).trained_steps for k in range(3)] == [(0, 2)] * 3
    assert forecast(again).counts[0].leaves == 2 * 2 * 2


@pytest.mark.slow
def test_a_run_with_a_window_of_ones_own_resumes_to_the_last_bit(tmp_path: Path):
    mine = write_part(tmp_path, CODE)
    again = same_when_resumed("mixgrpo", [*IMAGES, f"sampler.plan.window='{mine}:pair'"], tmp_path)
    assert again.task == "images"
    plan_for = planner(again, levels_of(again))
    assert [plan_for(k).trained_steps for k in range(3)] == [(0, 1), (1, 2), (0, 1)]


def test_a_credit_relies_on_what_a_plan_of_ones_own_offers(tmp_path: Path):
    mine = write_part(tmp_path, OFFERING)
    recipe = load_recipe("branchgrpo", [f"sampler.plan={mine}:late"])
    assert recipe.task == "images"
    assert forecast(recipe).counts[0].leaves == 16
    with pytest.raises(RecipeError, match=r'credit depth compares.*plan silent.*@offers\("tree"\)'):
        load_recipe("branchgrpo", [f"sampler.plan={mine}:silent"])
    with pytest.raises(RecipeError, match=r'objective neighbour.*plan is late.*@offers\("neighbours"\)'):
        load_recipe("neighbor_grpo", [f"sampler.plan={mine}:late"])


def test_the_page_says_every_word_that_a_part_may_offer():
    page = (Path(__file__).parents[2] / "docs" / "own_method.md").read_text(encoding="utf-8")
    rows = page.partition("## What a part offers")[2].splitlines()
    assert [word for word in OFFERED if not any(row.startswith(f"| `{word}` |") for row in rows)] == []


def test_a_plan_of_ones_own_is_planned_drawn_and_refused_its_wrong_options(command: Command, tmp_path: Path):
    mine = write_part(tmp_path, CODE)
    words = ("mixgrpo", "rollout.group=2", "data.heldout=null")
    status, said, _ = command("plan", *words, f"sampler.plan={mine}:fork", "--draw")
    assert status == 0
    assert "2 prompts" not in said
    assert "0–3" in said
    status, _, said = command("plan", *words, f"sampler.plan={{name: '{mine}:fork', widht: 3}}")
    assert status == 1
    assert "sampler.plan.widht: plan" in said
    assert "did you mean 'width'" in said
    with pytest.raises(RecipeError, match=r"sampler\.plan\.window\.size: .*greater than or equal to 1"):
        load_recipe("mixgrpo", [f"sampler.plan={{name: '{mine}:fork', window: {{name: random, size: 0}}}}"])


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "def mine(setting, iteration):\n    return []\n",
            r"plan .*mine returned list; return a flowgrpo\.samplers\.plans",
        ),
        (
            "def mine(setting):\n    return 3\n",
            r"mine has the parameters \(setting\), but it is called with 2 values; write plan\(setting, iteration",
        ),
        ("def mine(setting, iteration):\n    return 1 / 0\n", r"mine\.py, line 2: ZeroDivisionError"),
        (
            "from flowgrpo.samplers.plans import ode_plan\n"
            "def mine(setting, iteration):\n    return ode_plan(setting.sigmas, samples=2)\n",
            r"sampler\.plan .*mine trains no step, and objective transition needs one",
        ),
        (
            "from flowgrpo.samplers.plans import ode_plan\n"
            "def mine(setting, iteration):\n    return ode_plan(setting.sigmas, samples=2, trained=[0])\n",
            r"mine trains deterministic steps; use objective neighbour, directed, reward_gradient, reward_targets or ",
        ),
        (
            "from flowgrpo.samplers.plans import window_plan\n"
            "def mine(setting, iteration):\n"
            "    return window_plan(setting.sigmas, [iteration], setting.kernel, samples=2)\n",
            r"step 9 ends at sigma 0 and is trained",
        ),
    ],
)
def test_mistakes_in_a_plan_of_ones_own_are_found_before_a_model_is_loaded(code: str, said: str, tmp_path: Path):
    mine = write_part(tmp_path, code)
    with pytest.raises(ValueError, match=said):
        check(load_recipe("mixgrpo", [f"sampler.plan={mine}:mine"])).require()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("[num_steps - 1]", r"sampler\.plan\.window gives \[9\] in iteration 0; give whole numbers from 0 to 8"),
        ("[0.5]", r"sampler\.plan\.window gives \[0\.5\]"),
        ("[]", r"sampler\.plan\.window gives no step in iteration 0; give at least one"),
        ("7", r"sampler\.plan\.window: TypeError: .* is not iterable"),
        ("[1] * size", r"sampler\.plan\.window: window .*:mine failed: mine\.py, line 2: NameError"),
    ],
)
def test_mistakes_in_a_window_of_ones_own_are_found_too(answer: str, said: str, tmp_path: Path):
    mine = write_part(tmp_path, f"def mine(iteration, num_steps, seed):\n    return {answer}\n")
    with pytest.raises(ValueError, match=said):
        check(load_recipe("mixgrpo", [f"sampler.plan.window={mine}:mine"])).require()
