"""Impossible geometry is refused before a model loads, with the number that would fit."""

from typing import Any

import pytest
from pydantic import ValidationError

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.configs.reward_sections import RewardConfig
from flowgrpo.configs.schema import Recipe
from flowgrpo.training.checking import check
from flowgrpo.training.planning import forecast


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate({"rewards": [{"name": "gold"}], **sections})


def faults(**sections: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        recipe(**sections)
    return "\n".join(
        str([fault["loc"], fault["ctx"]["faults"]]) if fault["type"] == "part" else fault["msg"]
        for fault in caught.value.errors()
    )


def found(**sections: Any) -> str:
    """The findings of the check before a run, for a recipe that the schema accepts."""
    return "\n".join(check(recipe(**sections)).texts("fault"))


def test_a_group_of_one_has_no_baseline():
    said = found(rollout={"group": 1})
    assert "rollout.group is 1" in said
    assert "2 or more" in said
    assert recipe(rollout={"group": 2}).rollout.group == 2


def test_a_spine_may_have_one_root():
    made = recipe(rollout={"group": 1}, sampler={"plan": {"name": "spine", "splits": [1, 2], "width": 3}})
    assert forecast(made).images == made.rollout.prompts * 6


@pytest.mark.parametrize(
    ("window", "part"),
    [
        ({"size": 10}, "a size of at most 9"),
        ({"size": 4, "start": 6}, "a size of at most 3"),
        ({"size": 1, "start": 9}, "an earlier start"),
        ({"size": 4, "stop": 3}, "a size of at most 3"),
        ({"size": 2, "start": 5, "stop": 5}, "an earlier start"),
        ({"size": 2, "stop": 10}, "use at most 9"),
    ],
)
def test_a_window_must_fit_before_the_last_step(window: dict[str, int], part: str):
    said = found(sampler={"steps": 10, "plan": {"window": window}})
    assert "sampler.plan.window: " in said
    assert part in said


@pytest.mark.parametrize("window", [{"size": 9}, {"size": 4, "start": 5}, {"size": 4, "stop": 9}, "all"])
def test_a_window_that_just_fits_is_taken_and_planned(window: Any):
    made = recipe(sampler={"steps": 10, "plan": {"window": window}}, run={"iterations": 150})
    assert max(max(counts.trained_steps) for counts in forecast(made).counts) == 8


def test_the_length_of_a_schedule_is_that_of_its_table():
    sigmas = [1.0, 0.8, 0.5, 0.2, 0.0]
    assert "schedule of 4" in found(sampler={"steps": 10, "sigmas": sigmas})
    three = {"window": {"size": 3}}
    assert not found(sampler={"steps": 2, "sigmas": sigmas, "plan": three})
    assert "at least 3" in faults(sampler={"sigmas": [1.0, 0.0]})


@pytest.mark.parametrize("splits", [[], [10], [3, 12]])
@pytest.mark.parametrize("plan", ["branch", "spine"])
def test_splits_are_steps_of_the_schedule(plan: str, splits: list[int]):
    said = found(sampler={"plan": {"name": plan, "splits": splits}, "steps": 10})
    assert f"sampler.plan.splits is {splits}" in said
    assert "between 0 and 9" in said
    assert "greater than or equal to 0" in faults(sampler={"plan": {"name": plan, "splits": [-1, 2]}})
    assert "Field required" in faults(sampler={"plan": plan})


def test_an_update_needs_a_whole_group():
    said = faults(rollout={"prompts": 4}, optimizer={"updates": 5})
    assert "optimizer.updates is 5 with 4 prompts" in said
    assert "at most 4" in said
    assert recipe(rollout={"prompts": 4}, optimizer={"updates": 4}).optimizer.updates == 4


def test_ratios_belong_to_their_kernels():
    assert "belongs to kernel cps" in faults(objective={"ratio": "cps_released"})
    assert "needs objective.weight guard" in faults(
        sampler={"kernel": "cps"}, objective={"ratio": "guard", "weight": "none"}
    )
    recipe(sampler={"kernel": "cps"}, objective={"ratio": "cps_released", "weight": "none"})


def test_all_geometry_faults_come_together():
    said = faults(
        rollout={"chunk": 3, "prompts": 1},
        optimizer={"updates": 2},
        sampler={"guide": {}},
    )
    assert len(said.splitlines()) == 3


@pytest.mark.parametrize("place", ["train", "evaluate"])
def test_two_uses_of_a_reward_need_labels(place: str):
    twice = [{"name": "gold"}, {"name": "gold", "options": {"dense": True}}]
    labelled = [twice[0], {**twice[1], "label": "dense"}]

    def sections(rewards: list[dict[str, Any]]) -> dict[str, Any]:
        return {"rewards": rewards} if place == "train" else {"evaluate": {"rewards": rewards}}

    assert "two rewards are called gold; give one a `label`" in faults(**sections(twice))
    recipe(**sections(labelled))


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"iterations": True}},
        {"run": {"iterations": 2.0}},
        {"run": {"iterations": "2"}},
        {"optimizer": {"learning_rate": "0.1"}},
        {"name": 3},
        {"sampler": {"plan": {"shared_noise": 1}}},
    ],
)
def test_values_are_not_converted_between_types(sections: dict[str, Any]):
    faults(**sections)


def test_whole_numbers_are_good_for_real_ones():
    assert recipe(model={"lora": {"alpha": 8}}).model.lora.alpha == 8.0


def test_a_recipe_cannot_be_changed_after_it_was_checked():
    made = recipe()
    with pytest.raises(ValidationError):
        made.run.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        RewardConfig(name="gold", wieght=1.0)  # type: ignore[call-arg]


DATA = {"name": "data", "source": "a.jsonl", "weight": 0.1}
KL = {"name": "kl", "weight": 0.1}
CRITIC: dict[str, Any] = {}
PROBED = {"plan": {"probe": 1}}
SPINE = {"name": "spine", "splits": [0]}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"sampler": {"plan": "ode"}}, "sampler.plan ode has no stochastic step"),
        ({"objective": "neighbour"}, "objective neighbour chooses among deterministic trajectories"),
        ({"objective": "forward", "rollout": {"batch": 8}}, "use at least 12"),
        ({"penalties": [{"name": "distil", "weight": 0.1}]}, "learns a guided step, and sampler.guide is left out"),
        ({"reference": {}}, "no part of this recipe compares with the reference"),
        ({"objective": "forward", "penalties": [{"name": "w2", "weight": 0.1}]}, "use objective transition, or leave"),
        ({"penalties": [KL, KL]}, "has kl more than once; write it once, with the sum of the weights"),
        ({"penalties": [DATA, DATA]}, "has data more than once; write it once, with one source that has all"),
        ({"sampler": {"plan": {"name": "branch", "splits": [0], "probe": 1}}}, "plan branch has no option 'probe'"),
        ({"sampler": {"plan": {"completions": [1, 2]}}}, "plan window has no option 'completions'"),
        ({"sampler": {"plan": {"spread": 4.0}}}, "'spread' is an option of plan branch (sampler.plan.spread)"),
        ({"sampler": {"plan": {"name": "ode", "stochastic": "all"}}}, "plan ode has no option 'stochastic'"),
        ({"sampler": {"plan": {**SPINE, "flash_ratio": 0.5}}}, "plan spine has no option 'flash_ratio'"),
        ({"sampler": {"plan": {**SPINE, "pruned": {}}}}, "plan spine has no option 'pruned'"),
        ({"sampler": {"plan": {**SPINE, "window": {}}}}, "plan spine has no option 'window'"),
        ({"sampler": PROBED}, "sampler.plan.probe makes previews that only the credits turning, value, minimum read"),
        (
            {"sampler": {"plan": {"name": "ode", "window": "all"}}, "objective": "forward"},
            "plan ode trains the steps of its window without noise, and objective is forward",
        ),
        (
            {"sampler": {"plan": "ode"}, "objective": "neighbour"},
            "objective neighbour trains the steps of the plan's window, and sampler.plan.window is left out",
        ),
        (
            {"credit": "depth", "advantage": None, "sampler": {"plan": {"shared_noise": False}}},
            "one tree, which sampler.plan window does not make here",
        ),
        (
            {"credit": "value", "advantage": None, "sampler": PROBED, "objective": "forward"},
            "credit value needs trained transitions",
        ),
        ({"objective": "neighbour", "penalties": [KL], "sampler": {"plan": "ode"}}, "leave kl out of penalties"),
        (
            {
                "sampler": {"plan": {**SPINE, "completions": [1, 2]}},
                "select": [{"name": "best", "keep": 1}],
            },
            "a branch with several completions has several",
        ),
        (
            {"sampler": {"guide": {}}},
            "sampler.guide follows the gradient of a critic, and critic is left out; set critic",
        ),
        ({"credit": "turning", "advantage": None}, "use sampler.plan window with sampler.plan.probe 1"),
        ({"credit": "critic"}, "credit critic asks a critic, and critic is left out; add a `critic` section"),
        ({"critic": CRITIC}, "nothing here uses the critic"),
        (
            {"credit": "depth"},
            "compares by itself, with options of its own, and advantage is group; write advantage: null",
        ),
        (
            {"advantage": None},
            "credit leaf works on the advantages of samples, and advantage is null; write advantage: g",
        ),
        ({"combine": "worst", "advantage": "gdpo"}, "advantage gdpo normalises each reward by itself before"),
        ({"advantage": {"baseline": "length"}}, "images have none, use mean"),
        ({"advantage": {"name": "quantile", "low": 0.9}}, "advantage.low is 0.9 and advantage.high 0.8"),
        ({"select": [{"name": "best", "keep": 1, "among": "split"}]}, "select with among split needs a tree"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(sections: dict[str, Any], said: str):
    assert said in faults(**sections)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"sampler": {"plan": {"pruned": {"size": 12}}}}, "sampler.plan.pruned: 12 step"),
        ({"sampler": {"plan": {"flash_ratio": 0.4, "stochastic": "all"}}}, "use stochastic window"),
        (
            {"sampler": {"plan": {"probe": 0}, "solver": "dpmpp_2m"}, "advantage": None, "credit": "value"},
            "solver euler",
        ),
        ({"sampler": {"guide": {}, "plan": SPINE}, "critic": CRITIC}, "a plan with a stochastic main line"),
    ],
)
def test_plans_that_cannot_be_made_are_found_before_a_model_is_loaded(sections: dict[str, Any], said: str):
    assert said in found(**sections)


@pytest.mark.parametrize("weight", ["guard", "equalise"])
def test_the_released_cps_log_prob_is_no_density_to_even_out(weight: str):
    said = faults(sampler={"kernel": "cps"}, objective={"ratio": "cps_released", "weight": weight})
    assert "lacks the division by 2 s²" in said
    assert "use weight none, or ratio gaussian" in said


def test_the_released_cps_log_prob_has_no_divergence():
    objective = {"ratio": "cps_released", "weight": "none", "trust_nats": 1.0}
    assert "objective.trust_nats bounds a divergence of densities" in faults(
        sampler={"kernel": "cps"}, objective=objective
    )


def test_levels_of_the_forward_process_need_no_window():
    made = recipe(sampler={"plan": "ode", "steps": 3}, objective={"name": "forward", "loss": "awm"})
    (counts,) = forecast(made).counts
    assert (counts.evaluations, counts.trained_edges) == (3 * made.rollout.group, 0)


def test_parts_of_several_papers_combine():
    """A sliding window of a probed group, win rates, GRPO-Guard and a moving anchor; a pruned tree with a guide."""
    recipe(
        rewards=[{"name": "win_rate", "options": {"judge": "gold"}}],
        sampler=PROBED,
        advantage=None,
        credit="turning",
        select=[{"name": "extremes", "keep": 6}],
        penalties=[KL],
        reference={"every": 5},
    )
    recipe(
        sampler={"plan": {"name": "branch", "splits": [0, 2], "pruned": {"size": 2}}, "guide": {}},
        critic={},
        advantage=None,
        credit={"name": "depth", "fusion": "path"},
        select=[{"name": "extremes", "keep": 1, "among": "split"}],
    )


@pytest.mark.parametrize("name", ["text", "masked"])
def test_splits_that_a_recipe_of_text_leaves_out_are_the_embedded_problems(name: str) -> None:
    made = load_recipe(name, ["data={train: mine.txt}"])
    assert (made.data.heldout, made.data.source("test")) == ("arithmetic:heldout", "arithmetic:test")
    assert load_recipe(name, ["data={heldout: null}"]).data.train == "arithmetic:train"
    with pytest.raises(RecipeError, match="sizes of images"):
        load_recipe(name, ["data.buckets=[[64, 64]]"])
