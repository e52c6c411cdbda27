"""flow_grpo: the syntax tree gives the values, and the batches of all GPUs the prompts and updates of an iteration."""

from pathlib import Path
from typing import Any

import pytest

from flowgrpo.configs.load import load_recipe
from flowgrpo.convert.converting import convert_file
from flowgrpo.convert.flow_grpo_scripts import SCRIPTS, STABLE, model_word
from flowgrpo.convert.python_config import ConfigReader
from flowgrpo.convert.python_source import config_functions
from flowgrpo.convert.python_values import Unread
from flowgrpo.parts.choice import value_at
from tests.convert.samples_of_tools import BASE, CONFIGS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.py").write_text(BASE, encoding="utf-8")
    (tmp_path / "mine.py").write_text(CONFIGS, encoding="utf-8")
    return tmp_path


def recipe_of(folder: Path, function: str, more: str = "", gpus: int | None = None, before: str = "") -> Any:
    """The recipe of a function, with more lines before its `return`, and other functions before it."""
    head, _, tail = CONFIGS.partition(f"def {function}():")
    body, returned, rest = tail.partition("    return config\n")
    (folder / "mine.py").write_text(f"{head}{before}def {function}():{body}{more}{returned}{rest}", encoding="utf-8")
    converted = convert_file(f"{folder / 'mine.py'}:{function}", gpus=gpus)
    (folder / "out.yaml").write_text(converted.recipe, encoding="utf-8")
    return load_recipe(folder / "out.yaml")


def test_values_worked_out_by_hand(folder: Path) -> None:
    recipe = recipe_of(folder, "whole")
    # 8 GPUs × 6 images × int(16 / (8 × 6 / 12)) = 4 batches are 192 images: 16 prompts of 12.
    assert (recipe.rollout.prompts, recipe.rollout.group, recipe.rollout.batch) == (16, 12, 6)
    # 4 batches, and 2 of them for an optimizer step.
    assert recipe.optimizer.updates == 2
    assert recipe.optimizer.betas == (0.9, 0.99)
    assert recipe.model.call == {"height": 512, "width": 512, "guidance_scale": 4.5, "max_sequence_length": 128}
    assert (recipe.sampler.steps, value_at(recipe, "sampler.plan.window")) == (10, "all")
    assert (value_at(recipe, "sampler.kernel"), value_at(recipe, "sampler.kernel.eta")) == ("flow_sde", 0.7)
    assert value_at(recipe, "advantage.scale") == "batch"
    assert recipe.clamp == 5.0
    assert recipe.objective["surrogate"].options == {"low": 1e-4, "high": 1e-4, "dual": None}
    # Their KL lacks a division by the step size, and the ten steps from 1 to 0 have the mean size 1/10.
    assert recipe.penalties[0]["weight"] == pytest.approx(0.004)
    assert (recipe.optimizer.ema.decay, recipe.optimizer.ema.every) == (0.9, 8)
    assert (recipe.data.train, recipe.data.heldout) == ("prompts/mine/train.txt", "prompts/mine/test.txt")
    assert [(reward.name, reward.weight) for reward in recipe.rewards] == [
        ("pickscore", 1.0),
        ("my_rewards.py:wonder", 0.5),
    ]
    assert (recipe.run.seed, recipe.evaluate.every, recipe.evaluate.steps) == (7, 20, 40)


def test_the_guidance_of_evaluations_is_carried_over_where_it_is_another(folder: Path) -> None:
    """Only the script with a window reads it."""
    line = "    config.sample.eval_guidance_scale = {}\n"
    assert recipe_of(folder, "fast", line.format(7.0)).evaluate.call == {"guidance_scale": 7.0}
    assert recipe_of(folder, "fast", line.format(4.5)).evaluate.call == {}
    assert recipe_of(folder, "whole", line.format(7.0)).evaluate.call == {}


def test_the_fast_form_has_a_window_and_the_released_ratio(folder: Path) -> None:
    recipe = recipe_of(folder, "fast")
    window = recipe.sampler.plan["window"]
    assert (window.name, dict(window.options)) == ("random", {"size": 3, "interval": 1, "start": 0, "stop": 5})
    assert (value_at(recipe, "sampler.kernel"), value_at(recipe, "objective.ratio")) == ("cps", "cps_released")
    # The standard deviation of CPS is that of the whole step, so the KL is exact.
    assert recipe.penalties[0]["weight"] == 0.02
    # `gpu_number` is in the function that `fast` calls.
    assert recipe.rollout.prompts == 16


@pytest.mark.parametrize(
    ("more", "key", "value"),
    [
        ("    config.sample.same_latent = True\n", "sampler.plan.shared_noise", True),
        ("    config.sample.global_std = False\n", "advantage.scale", "group"),
        ("    config.mixed_precision = 'bf16'\n", "model.dtype", "bfloat16"),
        ("    config.use_lora = False\n", "model.train", "full"),
        ("    config.train.use_8bit_adam = True\n", "optimizer.type", "adamw_8bit"),
        ("    config.train.use_8bit_adam = False\n", "optimizer.type", "adamw"),
        ("    config.train.lora_path = 'adapters/mine'\n", "model.lora.start", "adapters/mine"),
        ("    config.sample.num_steps = 12\n", "sampler.steps", 12),
        ("    config.rationorm = True\n", "objective.ratio", "guard"),
        ("    config.num_epochs = 30\n", "run.iterations", 30),
        ("    config.sample.noise_level *= 2\n", "sampler.kernel.eta", 1.4),
        ("    config.sample.update({'noise_level': 0.25})\n", "sampler.kernel.eta", 0.25),
        ("    config['sample']['noise_level'] = 1 / 4\n", "sampler.kernel.eta", 0.25),
        ("    n = 3\n    config.seed = 1 if n > 2 else 0\n", "run.seed", 1),
        ("    if not config.use_lora:\n        config.seed = 3\n    else:\n        config.seed = 4\n", "run.seed", 4),
    ],
)
def test_single_settings(more: str, key: str, value: Any, folder: Path) -> None:
    assert value_at(recipe_of(folder, "whole", more), key) == value


def test_a_share_of_the_steps_is_the_first_ones_of_stochastic_steps(folder: Path) -> None:
    recipe = recipe_of(folder, "whole", "    config.train.timestep_fraction = 0.55\n")
    window = recipe.sampler.plan["window"]
    assert (window.name, dict(window.options)) == ("frozen", {"size": 5, "start": 0})
    assert value_at(recipe, "sampler.plan.stochastic") == "all"


def test_the_earlier_fast_form_branches_from_one_noise(folder: Path) -> None:
    more = "    config.sample.train_num_steps = 2\n    config.sample.mini_num_image_per_prompt = 9\n"
    recipe = recipe_of(folder, "whole", more)
    # A window of two steps begins at 0 to 5; each of the 6 prompts of a batch has 9 branches.
    assert dict(recipe.sampler.plan["window"].options) == {"size": 2, "interval": 1, "start": 0, "stop": 7}
    assert recipe.sampler.plan["shared_noise"]
    assert (recipe.rollout.prompts, recipe.rollout.group, recipe.rollout.batch) == (6 * 4 * 8, 9, 9)


def test_gpus_on_the_command_line_come_first(folder: Path) -> None:
    assert recipe_of(folder, "whole", gpus=2).rollout.prompts == 4


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        ("black-forest-labs/FLUX.1-dev", "model.lora.rank", 64),
        ("Qwen/Qwen-Image", "model.call", {"height": 512, "width": 512, "true_cfg_scale": 4.5, "negative_prompt": " "}),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "sampler.kernel", "wan_sde"),
    ],
)
def test_the_model_decides_which_script_is_meant(model: str, key: str, value: Any, folder: Path) -> None:
    more = f"    config.pretrained.model = {model!r}\n"
    assert value_at(recipe_of(folder, "whole", more), key) == value


def test_an_inherited_window_is_one_only_for_scripts_that_always_have_one(folder: Path) -> None:
    assert value_at(recipe_of(folder, "whole"), "sampler.plan.window") == "all"
    qwen = recipe_of(folder, "whole", "    config.pretrained.model = 'Qwen/Qwen-Image'\n")
    # The base has (0, 10), and the last of ten steps is never trained.
    assert dict(qwen.sampler.plan["window"].options) == {"size": 2, "interval": 1, "start": 0, "stop": 9}


def test_another_algorithm_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.algorithm is 'dpo'"):
        recipe_of(folder, "whole", "    config.train.algorithm = 'dpo'\n")


def test_a_file_of_several_configurations_asks_for_one(folder: Path) -> None:
    assert config_functions(ConfigReader(folder / "mine.py").main) == ["common", "whole", "fast"]
    with pytest.raises(ValueError, match=r"name one, such as .*mine\.py:fast\. It has common, whole, fast"):
        convert_file(str(folder / "mine.py"))
    with pytest.raises(ValueError, match="no function 'hole'; functions of configurations: common, whole, fast"):
        convert_file(f"{folder / 'mine.py'}:hole")


@pytest.mark.parametrize(
    "load",
    [
        "import imp\nbase = imp.load_source('base', os.path.join(os.path.dirname(__file__), 'base.py'))",
        "import importlib\nbase = importlib.import_module('config.base')",
        "import base",
        "from config import base",
        "from . import base",
        "import config.base as base",
    ],
)
def test_every_way_to_load_the_file_beside(load: str, folder: Path) -> None:
    text = f"import os\n{load}\n\ndef mine():\n    config = base.get_config()\n    config.seed = 9\n    return config\n"
    (folder / "mine.py").write_text(text, encoding="utf-8")
    values = ConfigReader(folder / "mine.py").read("mine").flat(frozenset())[0]
    assert (values["seed"], values["train.beta"], values["sample.sde_window_range"]) == (9, 0.0, [0, 10])


def test_a_function_that_is_imported_from_the_file_beside(folder: Path) -> None:
    text = "from base import get_config as start\n\ndef mine():\n    return start()\n"
    (folder / "mine.py").write_text(text, encoding="utf-8")
    assert ConfigReader(folder / "mine.py").read("mine").values["seed"] == 7


# -- what is not executed ----------------------------------------------------------------------------------------------


def read(folder: Path, body: str, head: str = "") -> dict[str, Any]:
    """The keys of `config` after some statements."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    start = f"import os\nimport ml_collections\n{head}\ndef mine():\n    config = ml_collections.ConfigDict()\n"
    text = f"{start}{lines}    return config\n"
    (folder / "hostile.py").write_text(text, encoding="utf-8")
    return ConfigReader(folder / "hostile.py").read("mine").flat(frozenset())[0]


def test_nothing_is_executed(folder: Path) -> None:
    mark = folder / "executed"
    head = f"open({str(mark)!r}, 'w')\n\ndef harm():\n    open({str(mark)!r}, 'w')\n    return 3\n"
    body = f"config.a = harm()\nconfig.b = os.system('touch {mark}')\nconfig.c = [open({str(mark)!r}, 'w')][0]"
    found = read(folder, body, head)
    assert not mark.exists()
    # A function of the file is followed: its `open` has no effect, and its result is a number.
    assert found["a"] == 3
    assert isinstance(found["b"], Unread)
    assert isinstance(found["c"], Unread)


def test_the_environment_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    found = read(folder, "config.a = os.environ['HF_TOKEN']\nconfig.b = os.getenv('HF_TOKEN', 'x')")
    assert [type(value) for value in found.values()] == [Unread, Unread]


@pytest.mark.parametrize(
    "body",
    [
        "config.a = 9 ** 9 ** 9",
        "config.a = 'x' * 10 ** 10",
        "config.a = 10 ** 15 * 10 ** 15",
        "config.a = 1 / 0",
        "config.a = [0] * 10 ** 9",
        "config.a = int('x')",
        "config.a = {**config}",
        "config.a = (lambda: 1)()",
        "config.a = [k for k in range(10 ** 9)]",
        "config.a = f'{config.b:>1000000000}'",
        "for k in range(10 ** 9):\n    config.a = k",
        "if os.fork():\n    config.a = 1",
        "while True:\n    config.a = 1",
        "try:\n    config.a = 1\nexcept Exception:\n    pass",
    ],
)
def test_what_only_a_run_would_show_is_unread(body: str, folder: Path) -> None:
    assert isinstance(read(folder, body)["a"], Unread)


def test_an_unread_value_is_named(folder: Path) -> None:
    converted = convert_file(f"{folder / 'mine.py'}:whole")
    assert not any("only a run" in line for line in converted.lines)
    (folder / "mine.py").write_text(
        CONFIGS.replace("train.beta = 0.04", "train.beta = os.cpu_count()"), encoding="utf-8"
    )
    lines = convert_file(f"{folder / 'mine.py'}:whole").lines
    assert any(line.startswith("  train.beta `os.cpu_count()`: only a run of the file") for line in lines)


@pytest.mark.parametrize(
    ("body", "head"),
    [
        ("config.a = first()", "def first():\n    return second()\n\ndef second():\n    return first()\n"),
        ("config.a = f9()", "def f0():\n    return 1\n" + "".join(
            f"def f{k + 1}():\n    x = [{', '.join([f'f{k}()'] * 9)}]\n    return x\n" for k in range(9)
        )),
        ("config.a = x", "x = x\n"),
    ],
)  # fmt: skip
def test_a_file_that_would_run_for_ever_is_refused(body: str, head: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="does more than a configuration does"):
        read(folder, body, head)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = " + "(" * 3000 + ")" * 3000, "not Python|words and signs"),
        ("x = " + "-" * 100_000 + "1", "words and signs"),
        ("x = " + "1+" * 100_000 + "1", "words and signs"),
        ("x = (\n" + "1 +\n" * 3000 + "1)", "words and signs"),
        ("def f(:\n", "not Python"),
        ("x = 'a\n", "not Python"),
        ("x = 1\0", "Python"),
        ("y" * (2**20 + 1), "more than 1,048,576 characters"),
    ],
)
def test_python_that_no_parser_should_see(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=says):
        convert_file(f"{tmp_path / 'hostile.py'}:f")


def test_many_comments_are_no_long_statement(folder: Path) -> None:
    (folder / "mine.py").write_text("# a\n" * 5000 + CONFIGS, encoding="utf-8")
    assert convert_file(f"{folder / 'mine.py'}:whole").tool == "flow_grpo"


def test_a_link_beside_the_file_that_leads_out_is_not_read(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "base.py"
    outside.write_text(BASE, encoding="utf-8")
    (folder / "base.py").unlink()
    (folder / "base.py").symlink_to(outside)
    with pytest.raises(ValueError, match="returns no configuration that can be read"):
        convert_file(f"{folder / 'mine.py'}:whole")


UNSURE = {
    "an update in an undecided if": "    if seen():\n        config.train.update({'beta': 0.5})\n",
    "a key of a loop": "    for k, v in [('beta', 0.5)]:\n        config.train[k] = v\n",
    "a key that is not known": "    config.train[seen()] = 0.5\n",
    "an annotated assignment": "    while True:\n        config.train.beta: float = 0.5\n        break\n",
    "an update in a try": "    try:\n        config.train.update(beta=0.5)\n    except ValueError:\n        pass\n",
    "setattr in an undecided if": "    if seen():\n        setattr(config.train, 'beta', 0.5)\n",
    "a function of another module": "    other.change(config.train)\n",
    "keys that are not known": "    config.train.update(seen())\n",
    "a key that is taken out in an undecided if": "    if seen():\n        del config.train.beta\n",
}


@pytest.mark.parametrize("more", UNSURE.values(), ids=UNSURE.keys())
def test_what_only_a_run_would_show_is_not_carried_over(folder: Path, more: str) -> None:
    recipe_of(folder, "whole", more)
    converted = convert_file(f"{folder / 'mine.py'}:whole")
    said = [line for line in converted.lines if line.strip().startswith("train.beta")]
    assert any("only a run of the file would show this value" in line for line in said)
    assert "name: kl" not in converted.recipe


SURE = {
    "setattr": ("    setattr(config.train, 'beta', 0.5)\n", 0.05),
    "a function of the file": ("    change(config)\n", 0.03),
    "a function that only reads": ("    print(config)\n", 0.004),
    "a function within": ("    def unused():\n        return 3\n", 0.004),
    "a key that is taken out": ("    del config.train.beta\n", None),
}


@pytest.mark.parametrize(("more", "weight"), SURE.values(), ids=SURE.keys())
def test_what_the_file_says_is_followed(folder: Path, more: str, weight: float | None) -> None:
    changes = "def change(config):\n    config.train.beta = 0.3\n\n\n"
    recipe = recipe_of(folder, "whole", more, before=changes)
    assert [one["weight"] for one in recipe.penalties] == ([] if weight is None else [pytest.approx(weight)])


def test_a_return_that_may_not_be_reached_is_refused(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"mine\.py, line \d+: only a run of the file would show whether this `return`"
    ):
        recipe_of(folder, "whole", "    if seen():\n        return other()\n")


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/home/wang/models/stable-diffusion-3.5-medium", ""),
        ("/data/influx/stable-diffusion-3.5-medium", ""),
        ("/home/wan/sd3", ""),
        ("/home/fluxuser/Wan2.1-T2V-1.3B", "wan"),
        ("black-forest-labs/FLUX.1-dev", "flux"),
        ("Qwen/Qwen-Image-Edit", "qwen-image-edit"),
        ("/m/QwenImage/", "qwen"),
        ("/hub/models--black-forest-labs--FLUX.1-Kontext-dev/snapshots/ab12", "kontext"),
        ("C:\\models\\FLUX.1-dev", "flux"),
        ("stabilityai/stable-diffusion-3.5-medium", ""),
    ],
)
def test_the_name_of_a_model_and_not_its_folder_says_which_script_it_is_for(path: str, word: str) -> None:
    assert model_word(path, [one for one in SCRIPTS if one], STABLE) == word
