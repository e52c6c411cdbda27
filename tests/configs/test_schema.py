"""Impossible geometry is refused before a model loads, with the number that would fit."""

from typing import Any

import pytest
from pydantic import ValidationError

from flowgrpo.configs.schema import Recipe, RewardConfig
from flowgrpo.training.planning import forecast


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate({"rewards": [{"name": "gold"}], **sections})


def faults(**sections: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        recipe(**sections)
    return "\n".join(fault["msg"] for fault in caught.value.errors())


def test_a_group_of_one_has_no_baseline():
    said = faults(rollout={"group": 1})
    assert "rollout.group is 1" in said
    assert "2 or more" in said
    assert recipe(rollout={"group": 2}).rollout.group == 2


def test_a_spine_may_have_one_root():
    made = recipe(rollout={"group": 1}, sampler={"plan": "spine", "splits": [1, 2], "width": 3})
    assert forecast(made).images == made.rollout.prompts * 6


@pytest.mark.parametrize(
    ("window", "part"),
    [
        ({"size": 10}, "a size of at most 9"),
        ({"size": 4, "start": 6}, "a size of at most 3"),
        ({"size": 1, "start": 9}, "an earlier sampler.window.start"),
        ({"size": 4, "stop": 3}, "a size of at most 3"),
        ({"size": 2, "start": 5, "stop": 5}, "an earlier sampler.window.start"),
        ({"size": 2, "stop": 10}, "use at most 9"),
    ],
)
def test_a_window_must_fit_before_the_last_step(window: dict[str, int], part: str):
    said = faults(sampler={"steps": 10, "window": window})
    assert "sampler.window" in said
    assert part in said


@pytest.mark.parametrize("window", [{"size": 9}, {"size": 4, "start": 5}, {"size": 4, "stop": 9}, {"kind": "all"}])
def test_a_window_that_just_fits_is_taken_and_planned(window: dict[str, Any]):
    made = recipe(sampler={"steps": 10, "window": window}, run={"iterations": 150})
    assert max(max(counts.trained_steps) for counts in forecast(made).counts) == 8


def test_the_length_of_a_schedule_is_that_of_its_table():
    sigmas = [1.0, 0.8, 0.5, 0.2, 0.0]
    assert "schedule of 4" in faults(sampler={"steps": 10, "sigmas": sigmas, "window": {"size": 4}})
    assert recipe(sampler={"steps": 2, "sigmas": sigmas, "window": {"size": 3}}).sampler.sigmas == sigmas
    assert "at least 3" in faults(sampler={"sigmas": [1.0, 0.0]})


@pytest.mark.parametrize("splits", [[], [10], [-1, 2]])
@pytest.mark.parametrize("plan", ["branch", "spine"])
def test_splits_are_steps_of_the_schedule(plan: str, splits: list[int]):
    said = faults(sampler={"plan": plan, "steps": 10, "splits": splits})
    assert f"sampler.splits is {splits}" in said
    assert "between 0 and 9" in said


def test_an_update_needs_a_whole_group():
    said = faults(rollout={"prompts": 4}, optimizer={"updates": 5})
    assert "optimizer.updates is 5 with 4 prompts" in said
    assert "at most 4" in said
    assert recipe(rollout={"prompts": 4}, optimizer={"updates": 4}).optimizer.updates == 4


def test_the_clip_is_set_once():
    assert "give one" in faults(objective={"clip_nats": 0.5, "options": {"high": 0.1}})


def test_ratios_belong_to_their_kernels():
    assert "belongs to kernel cps" in faults(objective={"ratio": "cps_released"})
    assert "needs objective.weight guard" in faults(
        sampler={"kernel": "cps"}, objective={"ratio": "guard", "weight": "none"}
    )
    recipe(sampler={"kernel": "cps"}, objective={"ratio": "cps_released", "weight": "none"})


def test_all_geometry_faults_come_together():
    said = faults(
        rollout={"group": 1, "prompts": 1}, optimizer={"updates": 2}, sampler={"steps": 3, "window": {"size": 3}}
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
        {"sampler": {"shared_noise": 1}},
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


CRITIC: dict[str, Any] = {}
PROBED = {"probe": 1}
TREE = {"plan": "branch", "splits": [0]}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"sampler": {"plan": "ode"}}, "sampler.plan ode has no stochastic step"),
        ({"objective": {"form": "neighbour"}}, "objective.form neighbour chooses among deterministic trajectories"),
        ({"objective": {"form": "awm"}, "rollout": {"batch": 8}}, "use at least 12"),
        ({"objective": {"times": 2}}, "objective.times belongs to a forward-process form"),
        ({"objective": {"old": {}}}, "objective.old belongs to a forward-process form"),
        ({"objective": {"distil": 0.1}}, "add sampler.guide, or leave it out"),
        ({"objective": {"anchor": {}}}, "objective.anchor moves a reference that nothing compares with"),
        ({"objective": {"form": "awm", "w2": 0.1}}, "objective.w2 belongs to objective.form transition"),
        ({"sampler": {"plan": "branch", "splits": [0], **PROBED}}, "sampler.probe has no meaning in plan branch"),
        ({"sampler": {"completions": [1, 2]}}, "sampler.completions has no meaning in plan window"),
        ({"sampler": {"spread": 4.0}}, "sampler.spread has no meaning in plan window"),
        ({"sampler": {"plan": "ode", "stochastic": "all"}}, "sampler.stochastic has no meaning in plan ode"),
        ({"sampler": {"plan": "spine", "splits": [0], "flash_ratio": 0.5}}, "sampler.flash_ratio has no meaning"),
        ({"sampler": {"plan": "spine", "splits": [0], "pruned": {}}}, "sampler.pruned has no meaning in plan spine"),
        ({"sampler": {"pruned": {"size": 12}}}, "sampler.pruned: 12 step"),
        (
            {"sampler": PROBED},
            "sampler.probe makes previews that only advantage.credit turning, value and minimum read",
        ),
        ({"sampler": {"flash_ratio": 0.4, "stochastic": "all"}}, "use sampler.stochastic window"),
        ({"advantage": {"credit": "depth"}, "sampler": {"shared_noise": False}}, "each image has a tree of its own"),
        (
            {"advantage": {"credit": "value"}, "sampler": PROBED, "objective": {"form": "awm"}},
            "advantage.credit value needs trained transitions",
        ),
        ({"objective": {"form": "neighbour", "kl": 0.1}, "sampler": {"plan": "ode"}}, "takes neither objective.kl"),
        (
            {
                "sampler": {"plan": "spine", "splits": [0], "completions": [1, 2]},
                "advantage": {"select": {"keep": 1}},
            },
            "a branch with several completions has several",
        ),
        ({"sampler": {"guide": {}}}, "add a `critic` section"),
        ({"sampler": {"guide": {}, "plan": "spine", "splits": [0]}, "critic": CRITIC}, "needs a stochastic main line"),
        ({"advantage": {"credit": "turning"}}, "use sampler.plan window with sampler.probe 1"),
        ({"advantage": {"credit": "critic"}}, "advantage.credit critic asks a critic"),
        ({"critic": CRITIC}, "a critic that nothing asks"),
        ({"advantage": {"fusion": "path"}}, "it belongs to advantage.credit depth"),
        ({"advantage": {"select": {"keep": 1, "among": "split"}}}, "advantage.select.among split needs a tree"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(sections: dict[str, Any], said: str):
    assert said in faults(**sections)


@pytest.mark.parametrize("weight", ["guard", "equalise"])
def test_the_released_cps_log_prob_is_no_density_to_even_out(weight: str):
    said = faults(sampler={"kernel": "cps"}, objective={"ratio": "cps_released", "weight": weight})
    assert "lacks the division by 2 s²" in said
    assert "use weight none, or ratio gaussian" in said


def test_the_released_cps_log_prob_has_no_divergence():
    objective = {"ratio": "cps_released", "weight": "none", "trust_nats": 1.0}
    assert "objective.trust_nats is a divergence of densities" in faults(sampler={"kernel": "cps"}, objective=objective)


def test_levels_of_the_forward_process_need_no_window():
    made = recipe(sampler={"plan": "ode", "steps": 3, "window": {"size": 4}}, objective={"form": "awm"})
    (counts,) = forecast(made).counts
    assert (counts.evaluations, counts.trained_edges) == (3 * made.rollout.group, 0)


def test_parts_of_several_papers_combine():
    """A sliding window of a probed group, win rates, GRPO-Guard and a moving anchor; a pruned tree with a guide."""
    recipe(
        rewards=[{"name": "win_rate", "options": {"judge": "gold"}}],
        sampler={"probe": 1},
        advantage={"credit": "turning", "select": {"keep": 6}},
        objective={"ratio": "guard", "weight": "guard", "kl": 0.1, "anchor": {"every": 5}},
    )
    recipe(
        sampler={"plan": "branch", "splits": [0, 2], "pruned": {"size": 2}, "guide": {}, "window": {"kind": "all"}},
        critic={},
        advantage={"credit": "depth", "fusion": "path", "select": {"keep": 1, "among": "split"}},
    )
