"""Parts put on methods: what a composed recipe is, where each setting comes from, and what is refused."""

import itertools
from pathlib import Path

import pytest
import yaml

from flowgrpo.configs.layers import KINDS, machine_of, parts, parts_of, prompt_file_note
from flowgrpo.configs.load import RecipeError, dump_recipe, load_image_recipe, load_recipe, recipe_names
from flowgrpo.configs.schema import Recipe
from flowgrpo.estimate.models import model_of
from flowgrpo.training.data import read_prompts

METHODS = ("flow_grpo", "flow_grpo_fast", "grpo_guard", "mixgrpo", "mixgrpo_flash", "branchgrpo", "branchgrpo_mix")
WHOLE_GROUPS = ("default", "diffusion_nft", "awm", "dgpo", "flow_dpo")  # their losses take no part of a group
OF = {kind: [name for name, part in parts().items() if part.kind == kind] for kind in KINDS}


def refused(source: str | Path) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(source)
    return str(caught.value)


def fits(model: str, task: str) -> bool:
    return parts()[task].medium in (None, parts()[model].medium)


def test_there_are_parts_for_the_standard_runs_and_each_says_what_it_is():
    known = {"sd35_medium", "flux_dev", "flux2_klein_4b", "flux2_klein_9b", "qwen_image", "z_image"}
    assert known | {"wan21_1_3b", "wan21_14b", "ltx2"} <= set(OF["models"])
    assert {"geneval", "ocr", "pickscore", "videoalign"} <= set(OF["tasks"])
    assert {"gpus1_24gb", "gpus1", "gpus8", "gpus32"} <= set(OF["hardware"])
    for part in parts().values():
        assert part.line
        assert not part.line.startswith("#")
        assert "chosen by us" in part.paper
    assert all(part.medium for part in parts().values() if part.kind == "models")
    assert all(part.files and part.prompts for part in parts().values() if part.kind == "tasks")
    assert {machine_of(f"flow_grpo+{name}")["gpus"] for name in OF["hardware"]} == {1, 8, 32}


def test_a_file_has_the_hardware_of_the_recipe_on_which_it_builds(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("base: flow_grpo+sd35_medium+gpus1_24gb\n")
    (tmp_path / "two.yaml").write_text("base: one.yaml\nname: two\n")
    (tmp_path / "none.yaml").write_text("base: flow_grpo+sd35_medium\n")
    for source in ("one.yaml", "two.yaml", "two.yaml@published"):
        assert machine_of(tmp_path / source) == parts()["gpus1_24gb"].machine
    assert machine_of(tmp_path / "none.yaml") == machine_of("default") == machine_of(None) == {}


def kl_of(recipe: Recipe) -> float:
    """The weight of its only penalty."""
    [penalty] = recipe.penalties
    assert penalty.name == "kl"
    weight: float = penalty["weight"]
    return weight


@pytest.mark.parametrize("method", METHODS)
def test_every_standard_run_is_a_recipe_that_reads_back_as_itself(method: str):
    for model, task in itertools.product(OF["models"], OF["tasks"]):
        name = f"{method}+{model}+{task}+gpus8"
        if not fits(model, task):
            assert parts()[task].medium in refused(name)
            continue
        recipe = load_image_recipe(name)
        assert recipe.name == name
        assert recipe.model.path == parts()[model].recipe["model"]["path"]
        assert recipe.model.train == "lora"
        assert recipe.rewards[0].name == task
        assert recipe.evaluate.rewards is None
        assert all(parts()[word].paper.split()[-1] in recipe.paper for word in (model, task, "gpus8"))
        assert Recipe.model_validate(yaml.safe_load(dump_recipe(recipe))) == recipe


@pytest.mark.parametrize("method", WHOLE_GROUPS)
def test_a_loss_of_whole_groups_gets_them_on_every_model(method: str):
    for model in OF["models"]:
        recipe = load_image_recipe(f"{method}+{model}+ocr+gpus8")
        assert recipe.rollout.batch >= recipe.rollout.group


CHOSEN = ("sampler", "combine", "advantage", "credit", "clamp", "select", "objective")


@pytest.mark.parametrize("method", METHODS)
def test_hardware_leaves_the_optimizer_step_as_it_is(method: str):
    """Groups are dealt to the processes, and losses are counts of the whole step, so no other value may change."""
    for model in OF["models"]:
        plain = load_image_recipe(f"{method}+{model}+ocr")
        for hardware in OF["hardware"]:
            found = load_image_recipe(f"{method}+{model}+ocr+{hardware}")
            for section in ("sampler", *CHOSEN, "objective", "penalties", "optimizer", "data", "rewards", "run"):
                assert getattr(found, section) == getattr(plain, section)
            # One process makes all samples of a prompt, and BranchGRPO has only 12 prompts.
            more = hardware == "gpus32" and method.startswith("branchgrpo")
            assert (found.rollout.prompts, found.rollout.group) == (
                32 if more else plain.rollout.prompts,
                plain.rollout.group,
            )
            assert found.rollout.prompts >= machine_of(f"{method}+{hardware}")["gpus"]
            assert found.model.lora == plain.model.lora
            assert found.model.call == plain.model.call


def test_settings_are_the_published_ones():
    """Rows of the released configurations, by hand."""
    made = load_image_recipe("flow_grpo+sd35_medium+geneval+gpus8")
    assert (made.sampler.steps, made.evaluate.steps, made.sampler.kernel["eta"]) == (10, 40, 0.7)
    assert (made.rollout.prompts, made.rollout.group, made.optimizer.updates) == (48, 24, 2)
    assert (made.model.lora.rank, made.model.lora.alpha, made.model.dtype) == (32, 64.0, "float16")
    assert made.model.call == {"height": 512, "width": 512, "guidance_scale": 4.5}
    assert (made.optimizer.learning_rate, made.advantage["scale"]) == (3e-4, "batch")
    assert made.optimizer.ema is not None
    assert (made.optimizer.ema.decay, made.optimizer.ema.every) == (0.9, 8)

    fast = load_image_recipe("flow_grpo_fast+sd35_medium+pickscore")
    assert (fast.rollout.prompts, fast.rollout.group) == (64, 18)
    assert (fast.sampler.kernel.name, fast.sampler.kernel["eta"]) == ("cps", 0.8)
    window = fast.sampler.plan["window"]
    assert (window["size"], window["stop"]) == (3, 5)
    assert fast.model.call["guidance_scale"] == 1.0
    assert load_image_recipe("flow_grpo_fast+sd35_medium+ocr").rollout.group == 24

    flux = load_image_recipe("flow_grpo+flux_dev+pickscore")
    assert (flux.sampler.steps, flux.evaluate.steps, flux.sampler.kernel["eta"], flux.penalties) == (6, 28, 0.9, [])
    assert (flux.model.lora.rank, flux.model.call["guidance_scale"]) == (64, 3.5)

    qwen = load_image_recipe("flow_grpo+qwen_image+ocr")
    assert (qwen.rollout.prompts, qwen.rollout.group, qwen.sampler.kernel["eta"], qwen.optimizer.ema) == (
        32,
        16,
        1.2,
        None,
    )
    assert qwen.sampler.plan["window"].written() == {"name": "random", "size": 2, "interval": 1, "start": 0, "stop": 5}

    for name, steps, evaluated in (("flux2_klein_9b", 8, 28), ("z_image", 10, 40)):
        new = load_image_recipe(f"flow_grpo+{name}+pickscore")
        assert (new.sampler.steps, new.evaluate.steps, new.sampler.kernel["eta"]) == (steps, evaluated, 0.7)
        window = new.sampler.plan["window"]
        assert window.written() == {"name": "random", "size": 1, "interval": 1, "start": 1, "stop": 4}
        assert (new.rollout.prompts, new.rollout.group, new.advantage["scale"]) == (48, 16, "group")
        assert (new.model.lora.rank, new.model.lora.alpha, new.model.call["guidance_scale"]) == (64, 128.0, 4.0)
        assert (new.optimizer.learning_rate, new.penalties) == (3e-4, [])

    wan = load_image_recipe("flow_grpo+wan21_1_3b+videoalign")
    assert (wan.sampler.steps, wan.sampler.kernel.name, wan.rollout.group, kl_of(wan)) == (
        20,
        "wan_sde",
        4,
        0.004,
    )
    assert (wan.optimizer.learning_rate, wan.advantage["scale"]) == (1e-4, "group")
    assert wan.model.call == {"height": 240, "width": 416, "num_frames": 33, "guidance_scale": 4.5}


# The latent of 121 frames of 512×768, and 126 tokens of sound.
LTX2 = 128 * 16 * 16 * 24 + 126 * 128


def test_the_settings_of_ltx2_are_the_published_ones() -> None:
    made = load_image_recipe("flow_grpo+ltx2+pickscore")
    assert (made.sampler.steps, made.evaluate.steps) == (24, 50)
    assert (made.sampler.kernel.name, made.sampler.kernel["eta"]) == ("cps", 0.8)
    window = made.sampler.plan["window"]
    assert window.written() == {"name": "subset", "size": 3, "interval": 1, "start": 0, "stop": 10}
    assert (made.rollout.prompts, made.rollout.group, made.optimizer.updates) == (48, 16, 2)
    assert (made.advantage.name, made.advantage["whiten"], made.penalties) == ("gdpo", True, [])
    assert (made.model.lora.rank, made.model.lora.alpha, made.optimizer.learning_rate) == (64, 128.0, 3e-4)
    assert made.optimizer.ema is not None
    assert (made.optimizer.ema.decay, made.optimizer.ema.every) == (0.9, 4)
    model = model_of(made.model)
    assert (model.branches, model.elements) == (1, LTX2)


@pytest.mark.parametrize(
    ("source", "clip", "elements"),
    [
        ("flow_grpo+sd35_medium+ocr", 1e-4, 16 * 64 * 64),
        ("grpo_guard+sd35_medium+ocr", 2e-6, 16 * 64 * 64),
        ("grpo_guard+flux_dev+pickscore", 4e-6, 16 * 64 * 64),
        ("mixgrpo+flux_dev+ocr", 1e-4, 16 * 64 * 64),
        ("branchgrpo+sd35_medium+ocr", 1e-3, 16 * 64 * 64),
        ("flow_grpo+wan21_1_3b+ocr", 1e-3, 16 * 9 * 30 * 52),
        ("grpo_guard+wan21_14b+ocr", 2e-6, 16 * 9 * 30 * 52),
        ("grpo_guard+wan21_14b+pickscore", 4e-6, 16 * 9 * 30 * 52),
        ("flow_grpo+flux2_klein_4b+pickscore", 1e-4, 32 * 64 * 64),
        ("grpo_guard+flux2_klein_9b+ocr", 2e-6, 32 * 64 * 64),
        ("grpo_guard+flux2_klein_9b+pickscore", 4e-6, 32 * 64 * 64),
        ("branchgrpo+flux2_klein_4b+ocr", 1e-3, 32 * 64 * 64),
        ("flow_grpo_fast+flux2_klein_4b+ocr", 1e-5, 32 * 64 * 64),
        ("flow_grpo_fast+z_image+ocr", 1e-5, 16 * 64 * 64),
        ("mixgrpo+wan21_1_3b+ocr", 1e-4, 16 * 9 * 30 * 52),
        ("flow_grpo+ltx2+pickscore", 1e-4, LTX2),
        ("grpo_guard+ltx2+ocr", 2e-6, LTX2),
        ("grpo_guard+ltx2+pickscore", 4e-6, LTX2),
        ("branchgrpo+ltx2+videoalign", 1e-3, LTX2),
    ],
)
def test_the_clip_is_the_published_one_at_the_size_of_the_model(source: str, clip: float, elements: int):
    nats = load_image_recipe(source).objective["surrogate"]["nats"]
    assert nats / elements == pytest.approx(clip, rel=0.03)


def test_special_settings_hold_for_a_method_and_what_is_built_on_it_alone():
    assert load_image_recipe("mixgrpo_flash+flux_dev+ocr").model.lora.rank == 128
    assert load_image_recipe("branchgrpo_mix+flux_dev+ocr").objective["surrogate"]["nats"] == 66.0
    assert load_image_recipe("flow_grpo+flux_dev+ocr").model.lora.rank == 64
    assert load_image_recipe("grpo_guard+flux_dev+ocr").optimizer.learning_rate == 1e-4
    assert kl_of(load_image_recipe("flow_grpo+sd35_medium+pickscore")) == 0.0025
    assert load_image_recipe("flow_grpo+flux_dev+pickscore").penalties == []
    assert load_image_recipe("grpo_guard+sd35_medium+pickscore").penalties == []


def test_the_order_in_which_parts_are_named_does_not_matter():
    words = ("gpus8", "ocr", "flux_dev")
    recipes = [load_recipe("+".join(["grpo_guard", *order])) for order in itertools.permutations(words)]
    assert all(recipe == recipes[0] for recipe in recipes)
    assert load_recipe("grpo_guard@published+flux_dev+ocr+gpus8") == recipes[0]


def test_a_part_changes_the_published_settings_of_a_method():
    assert load_image_recipe("flow_grpo+ocr").model == load_image_recipe("flow_grpo@published").model
    assert load_image_recipe("default+sd35_medium").rollout == load_image_recipe("mixgrpo_flash_guard").rollout


def test_overrides_do_not_reach_the_next_reading():
    assert load_image_recipe("flow_grpo+sd35_medium", ["model.call.height=256"]).model.call["height"] == 256
    assert load_image_recipe("flow_grpo+sd35_medium").model.call["height"] == 512


def test_a_file_may_build_on_a_composed_recipe_or_carry_parts(tmp_path: Path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: grpo_guard+flux_dev+ocr+gpus8\nname: mine\nrollout: {prompts: 16}\n", encoding="utf-8")
    recipe, base = load_image_recipe(mine), load_image_recipe("grpo_guard+flux_dev+ocr+gpus8")
    assert (recipe.rollout.prompts, recipe.model) == (16, base.model)
    other = tmp_path / "a+b.yaml"
    other.write_text("base: flow_grpo\nname: other\n", encoding="utf-8")
    assert load_recipe(other).name == "other"
    plain = tmp_path / "plain.yaml"
    plain.write_text("base: flow_grpo\nname: plain\n", encoding="utf-8")
    assert load_image_recipe(f"{plain}+flux_dev+ocr").sampler.steps == 6


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("flow_grpo+sd35_medum", ["'sd35_medum'", "did you mean 'sd35_medium'?", "flux_dev", "tasks: ", "gpus8"]),
        ("flow_grpo+sd35_medium+flux_dev", ["sd35_medium and flux_dev", "kind model", "name one"]),
        ("flow_grpo+ocr+geneval", ["ocr and geneval", "kind task"]),
        ("flow_grpo+gpus1+gpus8", ["gpus1 and gpus8", "kind hardware"]),
        ("flow_grpo+grpo_guard", ["grpo_guard is a method", "only the first word"]),
        ("sd35_medium+ocr", ["sd35_medium is a part", "begin with a method", "flow_grpo"]),
        ("flow_gpro+ocr", ["'flow_gpro'", "did you mean 'flow_grpo'?"]),
        ("text+sd35_medium", ["recipe of text"]),
        ("flow_grpo+sd35_medium+videoalign", ["videoalign is a task of videos", "sd35_medium makes images"]),
        ("flow_grpo+", ["no part ''"]),
    ],
)
def test_what_does_not_go_together_is_named(source: str, said: list[str]):
    message = refused(source)
    assert all(part in message for part in said), message


def test_naming_a_part_twice_is_naming_it_once():
    assert [part.name for part in parts_of("flow_grpo+ocr+ocr+gpus8")] == ["ocr", "gpus8"]


def test_no_part_has_the_name_of_a_recipe():
    assert not set(parts()) & set(recipe_names())


@pytest.mark.parametrize(
    ("task", "columns"),
    [("geneval", "include"), ("ocr", "double quotes"), ("pickscore", "one per line"), ("videoalign", "prompt")],
)
def test_a_missing_prompt_file_is_told_by_what_it_should_hold(task: str, columns: str):
    data = load_image_recipe(f"flow_grpo+{'wan21_1_3b' if task == 'videoalign' else 'sd35_medium'}+{task}").data
    assert data.heldout is not None
    for source in (data.train, data.heldout):
        with pytest.raises(ValueError, match="no prompt file") as caught:
            read_prompts(source)
        assert columns in str(caught.value)
        assert "data.train and data.heldout" in str(caught.value)
    assert prompt_file_note("mine.txt") is None


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("objective.old.decy=0.5", r"objective\.old\.decy: unknown key 'decy'; did you mean 'decay'"),
        ("objective.old.zz=1", r"objective\.old\.zz: unknown key 'zz'; known keys: decay, every, rise"),
        ("rewards=[{name: gold, label: total}]", "a reward is called total"),
    ],
)
def test_a_key_of_a_section_among_the_options_of_a_part_is_told_from_others(word: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe("default", [word])
