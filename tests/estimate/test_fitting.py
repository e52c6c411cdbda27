"""What `flowgrpo plan` proposes if a run does not fit on its GPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from flowgrpo.configs.load import load_image_recipe
from flowgrpo.configs.schema import Recipe
from flowgrpo.estimate.estimates import GIB, GPUS, Estimate, estimate
from flowgrpo.estimate.fitting import ROOM, Way, crowded_lines, ways_to_fit

SIZE = "model.call={height: 512, width: 512}"
SD35 = (
    "model.path=stabilityai/stable-diffusion-3.5-medium", "model.dtype=bfloat16", SIZE,
    "model.release_text_encoders=false", "rollout={prompts: 8, group: 24, batch: 24, decode_batch: 16}",
)  # fmt: skip
FULL = "model.train=full", "optimizer.learning_rate=1e-5"


def on_card(gib: float) -> Callable[[Recipe], Estimate]:
    """Estimates for a card with so many GiB."""
    return lambda recipe: replace(estimate(recipe), gpu=replace(GPUS["h100"], gib=gib))


def lines_of(gib: float, *words: str) -> tuple[Recipe, list[str]]:
    recipe = load_image_recipe("flow_grpo", [*SD35, *words])
    return recipe, crowded_lines(recipe, on_card(gib)(recipe), on_card(gib))


def again(recipe: Recipe, words: Sequence[str], gib: float) -> Estimate:
    """The estimate of the recipe with these overrides, as a user would ask for it."""
    return on_card(gib)(load_image_recipe("flow_grpo", [*SD35, *words]))


def test_a_run_that_fits_gets_no_advice() -> None:
    assert lines_of(1000.0)[1] == []


@pytest.mark.parametrize("gib", [80.0, 40.0, 24.0, 17.0])
def test_the_proposed_settings_fit_and_are_the_largest(gib: float) -> None:
    recipe = load_image_recipe("flow_grpo", list(SD35))
    ways = ways_to_fit(recipe, on_card(gib))
    assert ways
    for way in ways:
        found = again(recipe, way.words, gib)
        assert found == way.found
        assert found.peak <= ROOM * gib * GIB
        sizes = dict(word.split("=") for word in way.words if "batch" in word)
        for key, own in (("rollout.batch", 24), ("rollout.decode_batch", 16)):
            size = int(sizes.get(key, own))
            if size < own:
                larger = [*way.words, f"{key}={min(2 * size, own)}"]
                assert again(recipe, larger, gib).peak > ROOM * gib * GIB


def test_the_way_without_recomputing_comes_first() -> None:
    _, (head, one, other) = lines_of(40.0)
    assert head.endswith("; it fits, and takes the same optimizer steps, with")
    assert one.startswith("    rollout.batch=")
    assert other.startswith("    or model.gradient_checkpointing=true")
    assert " GiB, " in one
    assert one.endswith(" an iteration")


def test_text_encoders_leave_the_card_only_if_batches_do_not_help() -> None:
    assert not any("release_text_encoders" in line for line in lines_of(40.0)[1])
    _, (_, *ways) = lines_of(17.0)
    assert all("model.release_text_encoders=true" in line for line in ways)


def test_encoders_that_wait_in_host_memory_are_not_released() -> None:
    """A recipe may have one or the other."""
    _, lines = lines_of(17.0, "model.offload=[text_encoders]", "rollout.group=24")
    assert lines
    assert not any("release_text_encoders" in line for line in lines)


@pytest.mark.parametrize(
    ("waiting", "gib", "moved"),
    [
        ("vae", 17.0, "model.release_text_encoders=true"),
        ("text_encoders", 17.0, "'model.offload=[text_encoders, vae]'"),
    ],
)
def test_what_waits_already_goes_on_waiting(waiting: str, gib: float, moved: str) -> None:
    _, (head, *ways) = lines_of(gib, f"model.offload=[{waiting}]")
    assert "it fits, and takes the same optimizer steps" in head
    assert all(moved in line for line in ways)


def test_updates_of_whole_batches_get_other_states() -> None:
    """With `optimizer.cut: edges` the batches of trained states are dealt out to the updates."""
    _, (head, *ways) = lines_of(40.0, "optimizer.cut=edges")
    assert head.endswith("it fits, and optimizer.cut: edges deals out other states to updates, with")
    assert any("rollout.batch=" in line for line in ways)


def test_few_estimates_say_that_nothing_fits() -> None:
    """An estimate of a large model takes a good part of a second."""
    recipe, asked = load_image_recipe("flow_grpo", list(SD35)), []

    def estimated(one: Recipe) -> Estimate:
        asked.append(one)
        return on_card(2.0)(one)

    assert ways_to_fit(recipe, estimated) == []
    assert len(asked) == 8


def test_a_large_base_may_have_8_bits() -> None:
    flux = ["model.path=black-forest-labs/FLUX.1-dev", SIZE]
    _, (head, *ways) = lines_of(24.0, *flux)
    assert head.endswith("; it fits with a base in 8 bits, which rounds its predictions, with")
    assert all(line.lstrip(" or").startswith("model.quantize=int8 ") for line in ways)


def test_a_larger_base_may_have_4_bits() -> None:
    flux = ["model.path=black-forest-labs/FLUX.1-dev", SIZE]
    _, (head, *ways) = lines_of(20.0, *flux)
    assert head.endswith("; it fits with a base in 4 bits, which rounds its predictions, with")
    assert all(line.lstrip(" or").startswith("model.quantize=nf4 ") for line in ways)
    _, eight = lines_of(20.0, *flux, "model.quantize=int8")
    assert eight == [head, *ways]
    _, [line] = lines_of(6.0, *flux, "model.quantize=nf4")
    assert "smaller batches do not help" in line


def test_a_base_in_float32_may_have_bfloat16() -> None:
    """float32 is the default of `model.dtype`."""
    _, (head, *ways) = lines_of(24.0, "model.dtype=float32")
    assert head.endswith("; it fits in bfloat16, which rounds its predictions, with")
    assert all(line.lstrip(" or").startswith("model.dtype=bfloat16 ") for line in ways)


def test_a_loss_of_whole_groups_may_have_one_group_in_a_call() -> None:
    """The smallest power of two that it takes, 16, does not fit."""
    recipe = load_image_recipe("diffusion_nft", [*SD35, "rollout.group=12"])
    for way in (ways := ways_to_fit(recipe, on_card(24.0))):
        assert "rollout.batch=12" in way.words
    assert ways


def test_weights_that_do_not_fit_need_shards_and_not_a_smaller_batch() -> None:
    """More GPUs alone do not help: each of them holds all weights."""
    _, [line] = lines_of(24.0, *FULL)
    assert "smaller batches do not help" in line
    assert "--sharding fsdp2, or write model.train: lora" in line


def test_all_weights_may_have_averages_in_8_bits() -> None:
    """They take 6 bytes a parameter less."""
    _, (head, *ways) = lines_of(50.0, *FULL)
    assert head.endswith("; it fits with AdamW's averages in 8 bits, which rounds its steps, with")
    assert ways
    assert all("optimizer.type=adamw_8bit " in line for line in ways)


def test_shards_that_do_not_fit_are_not_proposed_again() -> None:
    recipe = load_image_recipe("flow_grpo", [*SD35, *FULL])

    def estimated(one: Recipe) -> Estimate:
        return replace(estimate(one, gpus=2, sharding="fsdp2"), gpu=replace(GPUS["h100"], gib=8.0))

    [line] = crowded_lines(recipe, estimated(recipe), estimated)
    assert "--sharding" not in line
    assert "model.train: lora" in line


def test_what_fits_nowhere_is_said() -> None:
    _, [line] = lines_of(2.0)
    assert "smaller batches do not help; share the frozen weights out among GPUs with --gpus N --sharding" in line
    assert line.endswith("use a larger GPU, a smaller model or smaller images")


@pytest.mark.parametrize("words", [(), FULL])
def test_parts_of_the_optimizer_may_become_shards(words: tuple[str, ...]) -> None:
    recipe = load_image_recipe("flow_grpo", [*SD35, *words])

    def estimated(one: Recipe) -> Estimate:
        return replace(estimate(one, gpus=2, sharding="zero2"), gpu=replace(GPUS["h100"], gib=2.0))

    [line] = crowded_lines(recipe, estimated(recipe), estimated)
    assert "with --gpus N --sharding fsdp2, or " in line


def test_a_base_in_8_bits_is_not_shared_out() -> None:
    """FSDP2 does not cut such a base."""
    _, [line] = lines_of(2.0, "model.quantize=int8")
    assert line.endswith("smaller batches do not help; use a larger GPU, a smaller model or smaller images")


def test_where_a_batch_has_a_whole_group_a_smaller_group_is_named() -> None:
    recipe = load_image_recipe("diffusion_nft", [*SD35, "rollout.group=12"])
    [line] = crowded_lines(recipe, on_card(2.0)(recipe), on_card(2.0))
    assert "and 12 images, a whole group, are the smallest batch; share" in line
    assert line.endswith("use a larger GPU, a smaller model, a smaller rollout.group or smaller images")


def test_a_batch_that_the_loss_refuses_is_not_proposed() -> None:
    """This loss takes whole groups of 12 in a call."""
    flux = ("model.path=black-forest-labs/FLUX.1-dev", "model.dtype=bfloat16", SIZE, "rollout.batch=24")
    recipe = load_image_recipe("default", [*flux, "model.train=lora", "optimizer.learning_rate=1e-4"])
    estimated = on_card(80.0)
    assert estimated(recipe).crowded
    ways = ways_to_fit(recipe, estimated)
    assert ways
    assert all("rollout.batch=" not in word for way in ways for word in way.words)


def test_a_way_is_written_as_a_command_takes_it() -> None:
    found = estimate(load_image_recipe("flow_grpo", list(SD35)))
    assert Way(("rollout.batch=4", "model.offload=[vae]"), found).line.startswith(
        "rollout.batch=4 model.offload=[vae]: "
    )
