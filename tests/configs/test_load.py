"""Reading recipes: names, files, overrides, and the message for each fault."""

from pathlib import Path

import pytest
import yaml

from flowgrpo.configs.load import RecipeError, dump_recipe, load_recipe, recipe_names, recipe_of_keys
from flowgrpo.configs.schema import SCHEMAS, Recipe
from flowgrpo.parts.traits import compares_rewards, noises_again
from flowgrpo.training.planning import forecast

SMALLEST = "rewards: [{name: gold}]\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def message(source: str | Path | None = None, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(source, overrides)
    return str(caught.value)


def test_packaged_recipes_are_listed_with_their_first_comment():
    names = recipe_names()
    assert "default" in names
    folder = Path(__file__).parents[2] / "flowgrpo" / "configs" / "recipes"
    assert set(names) == {path.stem for path in folder.glob("*.yaml")}
    assert all(line and not line.startswith("#") for line in names.values())


def test_recipes_are_told_apart_by_task():
    listed = {task: recipe_names(task) for task in SCHEMAS}
    assert {"text", "text_digits"} <= set(listed["text"])
    assert {"masked", "coupled_grpo"} <= set(listed["masked"])
    assert sum(map(len, listed.values())) == len(recipe_names())
    for task, schema in SCHEMAS.items():
        for name in listed[task]:
            recipe = load_recipe(name)
            assert type(recipe) is schema
            assert recipe.name == name
            assert schema.model_validate(yaml.safe_load(dump_recipe(recipe))) == recipe


@pytest.mark.parametrize("name", recipe_names("images"))
def test_every_packaged_recipe_validates_and_can_be_forecast(name: str):
    recipe = load_recipe(name)
    assert recipe.name == name
    expected = forecast(recipe)
    assert sum(expected.windows) == recipe.run.iterations
    assert expected.images >= (2 if compares_rewards(recipe) else 1) * recipe.rollout.prompts
    edges = not noises_again(recipe)
    assert all((counts.trained_edges > 0) == edges for counts in expected.counts)
    assert Recipe.model_validate(yaml.safe_load(dump_recipe(recipe))) == recipe


def test_nothing_named_is_the_default_recipe():
    assert load_recipe() == load_recipe("default")


def test_overrides_reach_sections_lists_and_free_keys():
    recipe = load_recipe(
        "mixgrpo_flash_guard",
        [
            "optimizer.learning_rate=1e-3",
            "rewards.0.weight=2",
            "rewards.0.options.dense=false",
            "sampler.plan.window.size=2",
            "model.call={guidance_scale: 4.5}",
            "model.call.max_sequence_length=64",
            "sampler.sigmas=[1, 0.6, 0.3, 0]",
            "sampler.plan.window.stop=null",
            "name=1e-3 or so",
            "objective.surrogate={name: clip, high: 2e-4}",
            "objective.surrogate.low=.inf",
        ],
    )
    assert recipe.optimizer.learning_rate == 1e-3
    assert recipe.rewards[0].weight == 2.0
    assert recipe.rewards[0].options == {"dense": False}
    assert recipe.sampler.plan["window"]["size"] == 2
    assert recipe.model.call == {"guidance_scale": 4.5, "max_sequence_length": 64}
    assert recipe.sampler.sigmas == [1.0, 0.6, 0.3, 0.0]
    assert recipe.name == "1e-3 or so"
    assert recipe.objective["surrogate"].options == {"low": float("inf"), "high": 2e-4, "dual": None}
    assert recipe.optimizer.updates == load_recipe().optimizer.updates


def test_the_last_of_two_overrides_wins():
    assert load_recipe(None, ["run.seed=1", "run.seed=2"]).run.seed == 2


@pytest.mark.parametrize("text", ["1e-3", "1.5e-3", "2E5", "+3e+2", ".5e1", "1.e2"])
def test_an_exponent_is_a_number_in_files_and_overrides(tmp_path: Path, text: str):
    """YAML 1.1 reads most of these as text, and free-form options would keep the text."""
    path = written(tmp_path, f"model: {{call: {{a: {text}}}}}\n{SMALLEST}")
    assert load_recipe(path).model.call == {"a": float(text)}
    assert load_recipe(None, [f"model.call.a={text}"]).model.call == {"a": float(text)}


def test_a_section_left_out_as_null_comes_back_by_an_assignment_in_it(tmp_path: Path):
    path = written(tmp_path, f"optimizer: {{ema: null}}\n{SMALLEST}")
    assert load_recipe(path).optimizer.ema is None
    ema = load_recipe(path, ["optimizer.ema.decay=0.5"]).optimizer.ema
    assert ema is not None
    assert ema.decay == 0.5


def test_a_dumped_recipe_reads_back_as_itself(tmp_path: Path):
    """`resume` reads the dump: infinite clips, tiny numbers, text that looks like a number, lists for tuples."""
    recipe = load_recipe(
        "mixgrpo_flash_guard",
        ["objective.surrogate={name: clip, low: .inf, high: 1e-6}", "optimizer.betas=[0.8, 0.95]"],
    )
    call = {"prompt": "1e-3", "none": "null", "on": "yes", "γ": "ü", "scale": 1e-7, "n": "12"}
    recipe = recipe.model_copy(update={"name": "2e5", "model": recipe.model.model_copy(update={"call": call})})
    again = load_recipe(written(tmp_path, dump_recipe(recipe)))
    assert again == recipe
    assert again.model.call == call
    assert again.optimizer.betas == (0.8, 0.95)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optimizer.learning_rat=1", ["optimizer.learning_rat", "did you mean 'learning_rate'?"]),
        ("rollouts.prompts=4", ["rollouts", "did you mean 'rollout'?"]),
        ("rewards.0.wieght=2", ["rewards.0.wieght", "did you mean 'weight'?"]),
        ("optimizer.ema.decya=0.5", ["optimizer.ema.decya", "did you mean 'decay'?"]),
        (
            "sampler.plan.window.zzz=0",
            ["sampler.plan.window.zzz", "window progressive has no option 'zzz'; its options are size, stride"],
        ),
        ("run.iterations=many", ["run.iterations", "integer", "'many'"]),
        ("run.iterations=true", ["run.iterations", "integer", "got true"]),
        ("run.iterations='5'", ["run.iterations", "integer", "'5'"]),
        ("run.iterations=0", ["run.iterations", "greater than or equal to 1", "got 0"]),
        (
            "sampler.kernel=flow_ode",
            ["sampler.kernel", "did you mean 'flow_sde'", "cps", "there is no kernel 'flow_ode'"],
        ),
        ("optimizer.betas=[0.9]", ["optimizer.betas"]),
        ("objective.surrogate={name: clip, high: wide}", ["objective.surrogate.high", "number", "'wide'"]),
        ("rewards=[]", ["rewards", "1 or more"]),
        ("evaluate.rewards=[]", ["evaluate.rewards", "1 or more", "null"]),
        ("run=3", ["run", "mapping"]),
        ("run.iterations", ["'run.iterations' is not key=value", "run.iterations=50"]),
        ("=5", ["'=5' is not key=value"]),
        ("run.seed={a", ["'run.seed={a'", "quote it"]),
        ("rewards.1.weight=2", ["'1' is not an entry of a list of 1"]),
        ("rewards.first.weight=2", ["'first' is not an entry of a list of 1"]),
        ("name.first=x", ["name is a value, not a section"]),
    ],
)
def test_a_bad_override_is_told_where_and_what(override: str, parts: list[str]):
    said = message("mixgrpo_flash_guard", override)
    assert all(part in said for part in parts), said


def test_all_faults_are_listed_at_once():
    said = message(None, "run.seed=-1", "optimizer.updtes=2", "sampler.steps=ten", "rewards.0.weight=[1]")
    assert said.startswith("default with run.seed=-1 optimizer.updtes=2 sampler.steps=ten rewards.0.weight=[1]:\n")
    assert len(said.splitlines()) == 5
    assert all(place in said for place in ("run.seed", "'updates'", "sampler.steps", "rewards.0.weight"))


def test_a_missing_recipe_names_the_nearest_and_all():
    said = message("defualt")
    assert "'defualt'" in said
    assert "did you mean 'default'?" in said
    assert all(name in said for name in recipe_names())
    assert "\n" not in said


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "not a mapping"),
        (b"- 1\n- 2\n", "holds a list, not a mapping"),
        (b"name: [a\n", "is not YAML"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"name: x\n", "rewards: is missing; write `rewards: [{name: …}]`, or `base: default` to begin with"),
        (b"1: 2\nrewards: [{name: gold}]\n", "1: the key 1 is a number, and keys are text"),
        (b"optimizer:\nrewards: [{name: gold}]\n", "optimizer:"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, content: bytes, part: str):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    said = message(path)
    assert str(path) in said
    assert part in said


def test_a_file_that_only_names_a_reward_is_a_whole_recipe(tmp_path: Path):
    recipe = load_recipe(written(tmp_path, SMALLEST))
    assert recipe.rewards[0].name == "gold"
    assert recipe == Recipe.model_validate({"rewards": [{"name": "gold"}]})


def test_options_without_a_name_are_of_the_part_that_is_there() -> None:
    window = load_recipe("mixgrpo_flash_guard", ["sampler.plan.window={size: 2}"]).sampler.plan["window"]
    assert (window.name, window["size"], window["stop"]) == ("progressive", 2, 4)
    with pytest.raises(RecipeError, match="window all has no option 'size'"):
        load_recipe("flow_grpo", ["sampler.plan.window={size: 2}"])
    another = load_recipe("mixgrpo_flash_guard", ["sampler.plan.window={name: frozen}"]).sampler.plan["window"]
    assert another.options == {"size": 4, "start": 0}
    plan = load_recipe("mixgrpo_flash_guard", ["sampler.plan={probe: null}"]).sampler.plan
    assert plan["flash_ratio"] == 0.7


def test_a_recipe_changes_its_base_key_by_key(tmp_path: Path) -> None:
    mine = written(
        tmp_path, "base: mixgrpo_flash_guard\nname: mine\nsampler: {kernel: {eta: 0.9}}\noptimizer: {ema: null}\n"
    )
    recipe, base = load_recipe(mine), load_recipe("mixgrpo_flash_guard")
    assert (recipe.name, recipe.sampler.kernel["eta"], recipe.optimizer.ema) == ("mine", 0.9, None)
    assert recipe.sampler.plan == base.sampler.plan
    assert recipe.rewards == base.rewards
    assert load_recipe(mine, ["sampler.kernel.eta=0.3"]).sampler.kernel["eta"] == 0.3


def test_the_published_section_is_a_layer_of_its_own(tmp_path: Path) -> None:
    text = "base: mixgrpo_flash_guard\nrollout: {group: 4}\npublished: {rollout: {group: 24}, sampler: {steps: 20}}\n"
    mine = written(tmp_path, text)
    assert (load_recipe(mine).rollout.group, load_recipe(mine).sampler.steps) == (4, 10)
    published = load_recipe(f"{mine}@published")
    assert (published.rollout.group, published.sampler.steps) == (24, 20)
    with pytest.raises(RecipeError, match="has no `published` section"):
        load_recipe("default@published")


def test_bases_that_lead_in_a_circle_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(f"base: {two}\n", encoding="utf-8")
    two.write_text("base: one.yaml\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="leads back to itself"):
        load_recipe(one)


def test_a_published_section_builds_on_that_of_another_recipe(tmp_path: Path) -> None:
    lower, upper = tmp_path / "lower.yaml", tmp_path / "upper.yaml"
    lower.write_text(
        "base: mixgrpo_flash_guard\npublished: {rollout: {group: 24}, sampler: {steps: 20}, run: {iterations: 7}}\n"
    )
    upper.write_text(f"base: mixgrpo_flash_guard\npublished: {{base: {lower}, sampler: {{steps: 25}}}}\n")
    published = load_recipe(f"{upper}@published")
    assert (published.rollout.group, published.sampler.steps, published.run.iterations) == (24, 25, 7)
    assert load_recipe(upper).rollout.group == load_recipe("mixgrpo_flash_guard").rollout.group
    upper.write_text(f"base: mixgrpo_flash_guard\npublished: {{base: {upper}}}\n")
    with pytest.raises(RecipeError, match="leads back to itself"):
        load_recipe(f"{upper}@published")
    upper.write_text("base: mixgrpo_flash_guard\npublished: {base: default}\n")
    with pytest.raises(RecipeError, match="default has no `published` section"):
        load_recipe(f"{upper}@published")


def test_settings_of_a_lora_that_nothing_trains_are_refused(tmp_path: Path) -> None:
    assert load_recipe("default").model.train == "full"
    for words in (["model.lora.rank=4"], ["model.lora={alpha: 4}"]):
        with pytest.raises(RecipeError, match=r"override 'model\.lora.* no effect.*write model\.train: lora"):
            load_recipe("default", words)
    assert load_recipe("default", ["model.lora.rank=4", "model.train=lora"]).model.lora.rank == 4
    assert load_recipe("mixgrpo", ["model.lora.rank=4"]).model.lora.rank == 4
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: default\nmodel: {lora: {rank: 4}}\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml: model\.lora has no effect"):
        load_recipe(mine)
    mine.write_text("base: default\nmodel: {train: lora, lora: {rank: 4}}\n")
    assert load_recipe(mine).model.lora.rank == 4
    mine.write_text(dump_recipe(load_recipe("default")))  # a run's own recipe names everything
    assert load_recipe(mine) == load_recipe("default").model_copy(update={"name": load_recipe(mine).name})


def test_a_refused_recipe_has_the_keys_of_its_faults():
    keys = {"rewards": [{"name": "gold"}], "optimizer": {"betas": 3}, "sampler": {"kernel": {"eta": "x"}}}
    with pytest.raises(RecipeError, match="mine:") as caught:
        recipe_of_keys("mine", keys)
    assert set(caught.value.places) == {"optimizer.betas", "sampler.kernel.eta"}
    with pytest.raises(RecipeError) as caught:
        load_recipe("default", ["rollout.prompts=1", "optimizer.updates=2"])
    assert caught.value.places == ("",)


def test_own_model_and_prompts_are_not_evaluated_on_an_embedded_world(tmp_path: Path):
    """Nobody asks for pictures of another world, with another model, who leaves the held-out prompts out."""
    mine = tmp_path / "mine.yaml"

    def heldout(*overrides: str, base: str = "flow_grpo", data: str = "train: prompts.txt") -> tuple[str | None, bool]:
        mine.write_text(f"base: {base}\ndata: {{{data}}}\nmodel: {{path: /models/sd35}}\n")
        recipe = load_recipe(mine, overrides)
        return recipe.data.heldout, "heldout" in recipe.data.model_fields_set

    assert heldout() == (None, False)
    assert heldout(base="text") == (None, False)
    assert heldout("data.heldout=heldout.txt") == ("heldout.txt", True)
    assert heldout("data.heldout=scenes:heldout") == ("scenes:heldout", True)
    assert heldout("data.heldout=null") == (None, True)
    assert heldout(data="train: p.txt, heldout: scenes:heldout") == ("scenes:heldout", True)
    assert heldout(data="train: p.txt, heldout: null") == (None, True)
    # The embedded model, or the embedded prompts, go with the embedded world.
    assert heldout("model.path=scenes")[0] == "scenes:heldout"
    assert heldout("data.train=scenes:train")[0] == "scenes:heldout"
    assert heldout(data="")[0] == "scenes:heldout"
    # A file on a file: what the lower one says is said.
    mine.write_text("base: flow_grpo\ndata: {heldout: scenes:heldout}\n")
    upper = tmp_path / "upper.yaml"
    upper.write_text("base: mine.yaml\ndata: {train: p.txt}\nmodel: {path: /models/sd35}\n")
    assert load_recipe(upper).data.heldout == "scenes:heldout"
    assert load_recipe("flow_grpo", ["model.path=/m", "data.train=p.txt"]).data.heldout is None
    assert load_recipe("flow_grpo@published").data.heldout == "geneval/test.jsonl"
    assert load_recipe("flow_grpo+sd35_medium+ocr").data.heldout == "ocr/test.txt"
