"""How two recipes differ: which keys are listed, and what is said about parts, lists and other tasks."""

import pytest

from flowgrpo.configs.load import load_recipe, recipe_names
from flowgrpo.configs.recipe_differences import Difference, defaults_of, differences, only_of


def compared(first: str, second: str, *overrides: str, own: tuple[str, ...] = ()) -> dict[str, Difference]:
    found = differences(load_recipe(first, own), load_recipe(second, overrides))
    return {one.key: one for one in found}


def test_a_changed_value_is_one_row_with_the_meaning_of_its_key():
    found = compared("flow_grpo", "flow_grpo", "rollout.group=4", "name=other", "paper=none")
    assert found == {"rollout.group": Difference("rollout.group", ("12",), ("4",), "Images per prompt.")}


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_does_not_differ_from_itself_and_differs_from_the_defaults_in_its_rewards(name: str):
    recipe = load_recipe(name)
    assert differences(recipe, recipe) == []
    found = differences(defaults_of(recipe), recipe)
    rewards = [one for one in found if one.key.startswith("rewards.")]
    assert [one.key for one in rewards] == [f"rewards.{reward.known_as}" for reward in recipe.rewards]
    assert all(one.first == ("–",) for one in rewards)


def test_the_defaults_are_those_of_the_schema():
    recipe = load_recipe("flow_grpo")
    found = {one.key: one for one in differences(defaults_of(recipe), recipe)}
    assert (found["optimizer.updates"].first, found["optimizer.updates"].second) == (("1",), ("2",))
    assert "sampler.kernel.eta" not in found  # the recipe writes the default


def test_the_same_part_is_compared_option_by_option_and_another_part_as_a_whole():
    found = compared("flow_grpo", "flow_grpo", "sampler.kernel.eta=0.5")
    assert list(found) == ["sampler.kernel.eta"]
    found = compared("flow_grpo", "flow_grpo", "objective.surrogate={name: clip, low: 0.1}")
    # An option that is null is off: `dual` of the clip is left out.
    assert list(found) == ["objective.surrogate"]
    assert found["objective.surrogate"].first == ("clip_nats", "nats: 6.6")
    assert found["objective.surrogate"].second == ("clip", "low: 0.1", "high: 0.2")


def test_parts_within_another_part_are_written_with_their_options():
    found = compared("flow_grpo", "diffusion_nft")["objective"]
    assert found.first[:3] == ("transition", "surrogate: clip_nats", "surrogate.nats: 6.6")
    assert found.second[0] == "forward"
    assert "loss.beta: 1.0" in found.second


def test_lists_are_compared_by_name_or_label():
    pair = "rewards=[{name: gold, weight: 2.0}, {name: jpeg_compressibility, label: small}]"
    found = compared("flow_grpo", "flow_grpo", pair, own=("rewards=[{name: gold}]",))
    assert {key: (one.first, one.second) for key, one in found.items()} == {
        "rewards.gold.weight": (("1.0",), ("2.0",)),
        "rewards.small": (("–",), ("name: jpeg_compressibility",)),
    }
    found = compared("flow_grpo", "flow_grpo", "penalties.kl=null")
    assert (found["penalties.kl"].first, found["penalties.kl"].second) == (("weight: 0.01",), ("–",))
    assert found["penalties.kl"].says.startswith("Exact KL of a step")


def test_another_order_is_told_as_such():
    first, second = (
        "rewards=[{name: gold}, {name: jpeg_compressibility}]",
        "rewards=[{name: jpeg_compressibility}, {name: gold}]",
    )
    found = compared("flow_grpo", "flow_grpo", second, own=(first,))
    assert {key: (one.first, one.second) for key, one in found.items()} == {
        "rewards (order)": (("gold, jpeg_compressibility",), ("jpeg_compressibility, gold",))
    }


def test_a_section_that_is_null_in_one_recipe_is_told_with_what_it_sets():
    found = compared("flow_grpo", "flow_grpo", "reference={decay: 0, every: 15}")["reference"]
    assert found.first == ("null",)
    assert set(found.second) == {"decay: 0.0", "every: 15"}


def test_free_mappings_are_compared_key_by_key():
    one, other = "model.call={height: 64, width: 64}", "model.call={height: 64, guidance_scale: 4.5}"
    found = compared("flow_grpo", "flow_grpo", other, own=(one,))
    assert {key: (row.first, row.second) for key, row in found.items()} == {
        "model.call.width": (("64",), ("–",)),
        "model.call.guidance_scale": (("–",), ("4.5",)),
    }


def test_recipes_of_two_tasks_are_compared_in_what_both_have():
    image, text = load_recipe("flow_grpo"), load_recipe("text")
    keys = [one.key for one in differences(image, text)]
    assert "optimizer.learning_rate" in keys
    assert not any(key.startswith(("sampler", "generation", "critic")) for key in keys)
    assert {"sampler", "critic", "model.call"} <= set(only_of(image, text))
    assert {"generation", "rollout.tokens"} <= set(only_of(text, image))
    assert only_of(image, load_recipe("dance_grpo")) == []


def test_meanings_are_one_sentence_without_marks():
    found = [one.says for one in differences(load_recipe("flow_grpo"), load_recipe("diffusion_nft"))]
    assert all("`" not in says and "](" not in says and ". " not in says for says in found)
