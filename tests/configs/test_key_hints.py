"""What a recipe says of a key that it does not have: the place or the name under which it is known here."""

from pathlib import Path

import pytest

from flowgrpo.configs.key_hints import OTHER_NAMES, hint, option_hint
from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.configs.schema import SCHEMAS, Recipe


def said(override: str, source: str = "default") -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(source, [override])
    return str(caught.value).splitlines()[-1].strip()


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("seed=1", "seed: unknown key 'seed'; did you mean run.seed?"),
        ("run.learning_rate=1", "did you mean optimizer.learning_rate or critic.learning_rate?"),
        ("optimizer.lr=1", "optimizer.lr: unknown key 'lr'; did you mean optimizer.learning_rate?"),
        ("run.epochs=3", "did you mean run.iterations or optimizer.epochs?"),
        ("train.learning_rate=1", "did you mean optimizer.learning_rate or critic.learning_rate?"),
        ("sample.num_steps=10", "did you mean sampler.steps or run.iterations?"),
        ("batch-size=3", "did you mean rollout.batch, rollout.prompts or rollout.group?"),
        ("guidance_scale=3", "did you mean model.call.guidance_scale?"),
        ("kl=0.1", "did you mean penalties.kl.weight?"),
        ("learning_rat=1", "did you mean optimizer.learning_rate or critic.learning_rate?"),
        ("models.path=x", "did you mean 'model'?"),
        ("evaluation.every=5", "did you mean 'evaluate'?"),
        ("sample.steps=5", "did you mean 'sampler'?"),
        ("optimizr.learning_rate=1", "did you mean 'optimizer'?"),
        ("output_dir=x", "the run folder is given on the command line, as `flowgrpo train --out FOLDER`"),
        ("optimizer.use_8bit_adam=true", "did you mean optimizer.type?"),
        ("optimizer.prodigy_beta3=0.9", "the optimizer is AdamW, with averages in 32 or 8 bits (optimizer.type)"),
        ("lora_dropout=0.1", "there is no dropout"),
        ("model.load_in_8bit=true", "did you mean model.quantize?"),
        ("model.load_in_4bit=true", "did you mean model.quantize?"),
        ("model.bnb_4bit_quant_type=nf4", "did you mean model.quantize?"),
        ("sampler.sde_window_size=2", "did you mean sampler.plan.window.size?"),
        ("run.logging_steps=1", "has a line for every iteration"),
        ("evaluate.rewards=[]", "is too short; write 1 or more entries, or null for the rewards of the training"),
        ("sampler.sigmas=[1.0]", "sampler.sigmas: is too short; write 3 or more entries"),
        ("beta=1", "'beta' is an option of credit depth (credit.beta)"),
        ("whatever=1", "unknown key 'whatever'; known keys: name, paper, data"),
    ],
)
def test_a_key_at_the_wrong_place_or_of_another_tool_is_led_to_its_place(override: str, part: str) -> None:
    assert part in said(override)


@pytest.mark.parametrize("section", ["model", "sampler", "rollout", "optimizer", "evaluate", "run", "critic"])
@pytest.mark.parametrize("end", ["", "s"])
def test_every_key_of_the_whole_recipe_in_a_section_has_an_answer(section: str, end: str) -> None:
    for key in Recipe.model_fields:
        assert hint((section, f"{key}{end}"), "x", ["path"], Recipe)


def test_a_section_has_no_name_and_other_keys_may_stand_outside() -> None:
    assert "model.name: unknown key 'name'; known keys: path, dtype" in said("model.name=x")
    assert said("rollout.advantage=x").endswith("did you mean 'advantage', which is outside of all sections?")
    assert said("optimizer.clamps=1").endswith("did you mean 'clamp', which is outside of all sections?")


def test_a_key_of_another_task_is_told_so() -> None:
    assert "recipes with task text or masked have it" in said("generation.max_tokens=3")
    assert "recipes with task images have it; known keys: system" in said("model.compile=true", "text")
    # The name of another tool leads to the key that the recipe's own task has.
    assert "did you mean generation.max_tokens?" in said("max_new_tokens=3", "text")
    assert "did you mean generation.tokens?" in said("max_new_tokens=3", "masked")


@pytest.mark.parametrize(("name", "keys"), OTHER_NAMES.items())
def test_every_name_of_another_tool_leads_to_a_key_that_exists(name: str, keys: tuple[str, ...]) -> None:
    told = [hint((name,), 1, [], schema) for schema in SCHEMAS.values()]
    assert all(any(key in one for one in told) for key in keys)
    # What a recipe calls by this name in the same place needs no translation.
    assert name not in Recipe.model_fields or name == "model"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model=flux", "its keys are path, dtype, train"),
        ("model=sd35", "sd35_medium is a part for a model; write it after a method, as in flow_grpo+sd35_medium"),
        ("model=flux", "flux_dev are parts for a model; write one of them after a method, as in flow_grpo+flux_dev"),
        ("run=3", "fixed_order, so write run.KEY=3"),
        ("rewards=pickscore", "should be a list (got 'pickscore'); write rewards=[{name: pickscore}]"),
        ("penalties=kl", "write penalties=[{name: kl}]"),
        ("model.teachers=runs/best", "write model.teachers=[{path: runs/best}]"),
        (
            "model.teachers={path: runs/best}",
            "(got a mapping); write model.teachers=[{path: …}], a list with this mapping",
        ),
        ("run.trackers=wandb", "write run.trackers=[wandb]"),
        ("penalties=[kl]", "penalties.0.weight: is missing"),
        (
            "evaluate=null",
            "evaluate: should be a mapping of keys (got null); write data.heldout=null to train without evaluations",
        ),
        ("evaluate.every=0", "(got 0); write data.heldout=null to train without evaluations"),
        ("evaluate.every=-1", "(got -1); write data.heldout=null to train without evaluations"),
        ("evaluate.quick.every=0", "(got 0); write evaluate.quick=null to leave these evaluations out"),
        ("run.sample_every=0", "(got 0); write run.iterations or more to save samples of the first iteration"),
        ("run.checkpoint_every=0", "(got 0); write run.iterations or more for none in between, except by run"),
        ("rollout=null", "rollout: should be a mapping of keys (got null); it cannot be null, so leave it out"),
        ("sampler.steps=null", "(got null)"),
        ("model.call=3", "model.call: should be a mapping of keys (got 3)"),
        ("objective=diffusion_nft", "This name belongs to: forward loss (objective.loss)."),
        ("sampler.kernel=sde", "did you mean 'dance_sde' or 'flow_sde' or 'wan_sde'?"),
    ],
)
def test_a_value_where_keys_or_a_list_belong_is_told_what_to_write(override: str, part: str) -> None:
    assert part in said(override)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("flux_dev", "no recipe or file 'flux_dev'; flux_dev is a part for a model; write it after a method"),
        ("flux", "'flux'; flux2_klein_4b, flux2_klein_9b, flux_dev are parts for a model; write one of them after"),
        ("ocr", "ocr is a part for a task; write it after a method, as in flow_grpo+ocr"),
        ("mine.yaml", "no recipe or file 'mine.yaml'; give the path of a YAML file"),
        ("mixgrpo+sd35", "did you mean 'sd35_medium'?"),
        ("kto", "no recipe or file 'kto'; kto is a part: write it at objective.loss (answer loss) of a recipe"),
    ],
)
def test_a_word_that_is_no_recipe_is_told_what_it_may_be(source: str, part: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(source)
    assert part in str(caught.value)


def test_a_run_folder_is_told_where_its_recipe_is(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path} is a run folder, not a recipe; {tmp_path}/config.yaml is its recipe, and "
        f"`flowgrpo resume {tmp_path}` continues the run"
    )


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--seed", "Keys of a recipe are written without dashes: run.seed=3"),
        ("--run.seed", "Keys of a recipe are written without dashes: run.seed=3"),
        ("--max-new-tokens", "Keys of a recipe are written without dashes: generation.max_tokens=3 or "),
        ("--output-dir", "The run folder is given on the command line"),
        ("--dry-run", "`flowgrpo plan` shows what a recipe does, without a run"),
        ("--config", "A recipe is the first word, without an option: 3"),
        ("--foo", ""),
    ],
)
def test_an_option_that_is_a_key_of_recipes_is_told_how_to_be_written(option: str, told: str) -> None:
    found = option_hint(option, "3")
    assert found.startswith(told)
    assert bool(found) == bool(told)
