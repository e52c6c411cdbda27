"""How each command of the documentation is run here: really, in this process, on small models and data.

A rule gets the words after the command's name, and returns the words that are run. It makes the files and runs that the
words name, and adds options that make long commands short. A command without a rule fails its test.
"""

import json
import os
import re
import signal
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml

from flowgrpo.bench import measures as bench
from flowgrpo.bench import text_measures as bench_text
from flowgrpo.bench import timed_iterations
from flowgrpo.bench.interruption import interruption
from flowgrpo.cli import rewards as cli_rewards
from flowgrpo.cli.plan import split
from flowgrpo.configs.load import load_recipe, recipe_names
from flowgrpo.configs.schema import AnyRecipe, MaskedRecipe, Recipe
from flowgrpo.gallery.vote_server import VoteServer
from flowgrpo.kit import optimise
from flowgrpo.pipelines.conformance import conform as conformance
from flowgrpo.pipelines.conformance.videos import VIDEOS
from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.person import person
from flowgrpo.rewards.registry import check_options, resolve
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.recipe_plans import check_plans
from flowgrpo.worlds import building
from tests.convert.samples_of_tools import BASE, CONFIGS
from tests.doc_commands_read import PAGES, Example, examples
from tests.doc_commands_reader import EMBEDDED, NoRule, Reader, Rule, given
from tests.doc_commands_stock import interrupted, put_prompts
from tests.gallery.folders import record, write_run
from tests.gallery.voting import Client
from tests.inference import hub_server
from tests.rewards.certificate import CERTIFICATE, KEY
from tests.rewards.marking import Marker
from tests.text.diffusion_folders import llada_folder, sdar_folder
from tests.tiny_rewards import save_open_clip

# Large enough that the memory of a forward and backward pass can be measured in an almost empty process.
SMALL_TEXT = bench_text.Sizes(group=4, prompt=192, completion=8, width=64, layers=2, heads=2)

# Small enough for runs of some seconds: four images and few steps, for every recipe.
TINY_ROLLOUT = ("rollout={prompts: 2, group: 2, batch: 4, decode_batch: 4}", "sampler.steps=4")
TINY_WINDOW = "sampler.plan.window={name: frozen, size: 2, start: 0}"

# Options that make `bench claims` and `bench race` read their words, and train nothing.
NO_RUNS = ("--budget", "0")

DIFFUSION = {"LLaDA": llada_folder, "SDAR": sdar_folder}

RULES: dict[tuple[str, ...], Rule] = {}


def rule(*path: str) -> Callable[[Rule], Rule]:
    """A decorator that makes a function the rule of a command."""

    def keep(function: Rule) -> Rule:
        RULES[path] = function
        return function

    return keep


# -- recipes and runs --------------------------------------------------------------------------------------------------


def recipe_words(words: Sequence[str] | None) -> tuple[str, list[str]]:
    """The recipe and the overrides of a command."""
    source, overrides = split(list(words or []))
    return source or "default", overrides


def small_recipe(reader: Reader, source: str, overrides: Sequence[str]) -> list[str]:
    """Overrides that make any recipe short. The recipe is also read without them, and missing prompt files are made."""
    recipe = load_recipe(source, overrides)
    small = ["run.iterations=1", f"rollout.prompts={max(2, recipe.optimizer.updates)}", "evaluate.prompts=1"]
    if isinstance(recipe, Recipe):
        if recipe.critic is not None:
            small += ["run.iterations=2", "critic.warmup=1"]  # a critic is first used in the second iteration
        if recipe.model.path != "scenes":
            # With as many steps in an evaluation as in a rollout, the pipeline is checked once.
            small += ["model.path=scenes", "model.dtype=float32", "model.call={}", "evaluate.steps=null"]
    elif isinstance(recipe, MaskedRecipe):
        path = "arithmetic:masked" if recipe.model.block is None else _put_sdar(reader)
        small += [f"model.path={path}", "model.dtype=float32", "generation.tokens=4", "sampler.steps=4"]
    else:
        # Completions that the data give are refused if they are longer.
        small.append(f"generation.max_tokens={8 if recipe.rollout.form.name == 'given' else 4}")
        if recipe.model.path not in EMBEDDED:
            small += ["model.path=arithmetic", "model.dtype=float32", "model.system=null"]
    _put_files(reader, recipe)
    few = ["sampler.steps=6", "sampler.sigmas=null"] if isinstance(recipe, Recipe) else []
    # Trees of four leaves, unless the page chooses where they split.
    branches = isinstance(recipe, Recipe) and recipe.sampler.plan.name == "branch"
    tree = ["sampler.plan.splits=[0, 1]"] if branches and not any("splits" in word for word in overrides) else []
    for more in ([*few, *tree, "rollout.group=4"], [*few, "rollout.group=4"], ["rollout.group=4"], few):
        # Some recipes split or select samples in larger groups, or train more steps than these.
        with suppress(ValueError):
            smaller = load_recipe(source, [*overrides, *small, *more])
            if isinstance(smaller, Recipe | MaskedRecipe):
                check_plans(smaller)
            return [*small, *more]
    return small


def _put_sdar(reader: Reader) -> Path:
    place = reader.home / "sdar"
    return place if place.exists() else sdar_folder(place)


def _put_files(reader: Reader, recipe: AnyRecipe) -> None:
    for file in (recipe.data.train, recipe.data.heldout, recipe.data.test):
        if file is not None and ":" not in file and not Path(file).is_absolute():
            read = any(reward.name == "ocr" for reward in recipe.rewards)
            # A name without an ending is the folder of a data set.
            place = reader.home / (file if Path(file).suffix else f"{file}/train.jsonl")
            put_prompts(place, text=not isinstance(recipe, Recipe), words=read)


def put_recipe(reader: Reader, source: str, example: Example) -> None:
    """Write the file of a recipe, from the page's fence with this `name`; `mine.yaml` needs no fence."""
    file = reader.home / source.partition("@")[0]
    if file.suffix != ".yaml" or file.exists():
        return
    named = re.compile(rf"^name: {re.escape(file.stem)}$", re.MULTILINE)
    shown = [other.text for other in examples(example.page) if other.kind == "yaml" and named.search(other.text)]
    if file.stem == "mine":
        shown.append("base: mixgrpo_flash_guard\nname: mine\n")
    if not shown:
        raise NoRule(f"no page shows {source}")
    file.write_text(shown[0], encoding="utf-8")


@rule("train")
def _train(reader: Reader, words: list[str], example: Example) -> list[str] | None:
    source, overrides = recipe_words(given(["train"], words)["words"])
    put_recipe(reader, source, example)
    if example.kind == "span" and source in recipe_names() and not overrides:
        # tests/training/test_recipes.py trains every recipe of the package.
        reader.flowgrpo("plan", source)
        return None
    return [*words, *small_recipe(reader, source, overrides)]


@rule("plan")
def _plan(reader: Reader, words: list[str], example: Example) -> list[str]:
    source, overrides = recipe_words(given(["plan"], words)["words"])
    put_recipe(reader, source, example)
    if not source.endswith(".yaml"):
        return words
    # `plan` checks the files that a recipe names, so the reader's own recipe must have them.
    return [*words, *small_recipe(reader, source, overrides)]


@rule("resume")
def _resume(reader: Reader, words: list[str], example: Example) -> list[str]:
    run = reader.home / given(["resume"], words)["run"]
    if not run.exists():
        reader.stock.put_run(run)
        interrupted(run)
    return ["run.iterations=3" if word.startswith("run.iterations=") else word for word in words]


@rule("fork")
def _fork(reader: Reader, words: list[str], example: Example) -> list[str]:
    """Fork a run after its first iteration, and leave one more to do."""
    asked = given(["fork"], words)
    run = reader.home / asked["run"]
    if not run.exists():
        reader.stock.put_run(run)
        interrupted(run)
    if asked["out"] is None and example.kind == "span":
        words = [*words, "--out", f"fork-{len(list(reader.home.glob('fork-*')))}"]
    return ["1" if word == asked["checkpoint"] else word for word in [*words, "run.iterations=2"]]


@rule("adapter")
def _adapter(reader: Reader, words: list[str], example: Example) -> list[str]:
    reader.stock.put_run(reader.home / given(["adapter"], words)["run"])
    return words


def _put_film_model(reader: Reader) -> list[str]:
    """Write a tiny model of videos into the folder `film`; returns the words that call it."""
    tiny = VIDEOS["WanPipeline"]
    tiny.fresh().save_pretrained(reader.home / "film")
    keys = {**{f"model.call.{name}": value for name, value in tiny.call.items()}, "evaluate.steps": 2}
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


@rule("sample")
def _sample(reader: Reader, words: list[str], example: Example) -> list[str]:
    asked = given(["sample"], words)
    model = asked["model"]
    if asked["animation"] is not None:
        return [*("film" if word == model else word for word in words), *_put_film_model(reader)]
    if (diffusion := next((name for name in DIFFUSION if name in model), None)) is not None:
        tiny = str(DIFFUSION[diffusion](reader.home / diffusion))
        return [*(tiny if word == model else word for word in words), "--max-tokens", "8"]
    put = put_model(reader, model)
    return [put if word == model else word for word in words]


@rule("convert")
def _convert(reader: Reader, words: list[str], example: Example) -> list[str] | None:
    if not words:
        return None
    file, _, function = str(given(["convert"], words)["file"]).partition(":")
    if function:
        # flow_grpo's own configuration has a file beside it, too.
        (reader.home / file).parent.mkdir(parents=True, exist_ok=True)
        named = CONFIGS.replace("def fast(", f"def {function}(")
        (reader.home / file).write_text(named, encoding="utf-8")
        (reader.home / file).with_name("base.py").write_text(BASE, encoding="utf-8")
    return words


@rule("export")
def _export(reader: Reader, words: list[str], example: Example) -> list[str]:
    put_model(reader, str(given(["export"], words)["run"]))
    return words


@rule("push")
def _push(reader: Reader, words: list[str], example: Example) -> None:
    run = str(given(["push"], words)["run"])
    if run.startswith("runs/"):
        reader.put_run(run)
    with hub_server.serving() as hub, pytest.MonkeyPatch.context() as patch:
        hub_server.use(hub, patch)
        reader.flowgrpo("push", *words, "--yes")
        (files,) = hub.files.values()
    assert "README.md" in files
    assert any(name.endswith(".safetensors") for name in files)


@rule("evaluate")
def _evaluate(reader: Reader, words: list[str], example: Example) -> list[str]:
    told = given(["evaluate"], words)
    put = put_model(reader, told["model"])
    source, overrides = recipe_words(told["words"])
    put_recipe(reader, source, example)
    text = "text" in put or (source != "default" and not isinstance(load_recipe(source, overrides), Recipe))
    small = ["evaluate.prompts=2", "evaluate.seeds=1", "generation.max_tokens=4" if text else "evaluate.steps=4"]
    return [*([] if words else [put]), *(put if word == told["model"] else word for word in words), *small]


def put_model(reader: Reader, word: str) -> str:
    """Make the run, folder or downloaded model that a word names; returns the word to use for it."""
    if word.startswith("runs/"):
        reader.put_run(word, text="text" in word)
        return word
    return reader.put_model(word)


@rule("bench")
def _bench(reader: Reader, words: list[str], example: Example) -> list[str] | None:
    told = given(["bench"], words)
    name = told["name"]
    if name == "claims":
        # Only one claim, on one seed, and one short run. Only the first command makes them.
        small = ["guard-ratio", "dance_grpo", "--seeds", "0", "--scale", "1e-3", *TINY_ROLLOUT, TINY_WINDOW]
        small += ["evaluate.prompts=2", "evaluate.steps=4", "optimizer.updates=1"]
        if not reader.first("bench", name):
            return [*words, *small, *NO_RUNS]
        reader.patch.setattr("flowgrpo.bench.claims.gather.MOST_SEEDS", 1)
        reader.flowgrpo("bench", *words, *small)
        results = reader.home / (told["results"] or "runs/claims")
        assert list(results.glob("grpo_guard+proxy-seed0-*.json"))
        assert list(results.glob("dance_grpo-rise-*.json"))
        return None
    if name == "race":
        for word in words:
            if word.startswith("model.path="):
                reader.put_model(word.partition("=")[2])
        # Without a rate, a recipe has runs that choose one: tests/bench/test_race.py makes these.
        small = ["diffusion_nft=6e-4", "--seeds", "0"]
        small += ["--scale", "1e-6", *TINY_ROLLOUT, "evaluate.prompts=2"]
        if not reader.first("bench", name) and example.kind == "span":
            return [*words, *small, *NO_RUNS]
        # The default is raced at its own length, whatever the scale, which takes minutes.
        reader.flowgrpo("bench", *(word for word in words if word != "default"), *small)
        results = reader.home / (told["results"] or "runs/race")
        assert list(results.glob("race-diffusion_nft-rate*-seed0-*.json"))
        return None
    if name == "first-run":
        # One run of two iterations, with a quick evaluation; the embedded pipeline and its prompts stay.
        small = ["run.iterations=2", "evaluate.prompts=2", "evaluate.seeds=1", "evaluate.quick={every: 1, prompts: 1}"]
        small += ["rollout.prompts=2", "data.test=heldout.txt"]
        (reader.home / "heldout.txt").write_text("a red circle\na star\n", encoding="utf-8")
        return [*words, "--seeds", "0", *small]
    if name == "interruption":
        # Only the unbroken run; tests/training/test_trainer.py kills and compares.
        reader.patch.setitem(bench.MEASUREMENTS, name, partial(interruption, kills=0))
        small = ["run.iterations=1", "run.checkpoint_every=1", "evaluate.prompts=1"]
        return [*words, *TINY_ROLLOUT, TINY_WINDOW, *small]
    if name == "signal" and {"default", "diffusion_dpo"} & set(words):
        # These recipes have no window.
        reader.patch.setattr("flowgrpo.bench.signal.signal.__defaults__", (3,))
        return [*words, *TINY_ROLLOUT, "evaluate.prompts=2"]
    if name == "shared-prefix":
        small_one = partial(bench_text.shared_prefix, sizes=SMALL_TEXT)
        reader.patch.setitem(bench_text.TEXT_MEASUREMENTS, name, small_one)
        return words
    if name == "iteration":
        # An embedded model replaces a model of billions of parameters, nothing is compiled for minutes, and one
        # iteration is made in place of four.
        reader.patch.setattr(timed_iterations, "WARM_UP", 0)
        source, overrides = recipe_words(told["words"])
        small = small_recipe(reader, source, overrides)
        # Then commands differ only in their method and keys; those with the same ones are read, and one is run.
        method, keys = source.partition("+")[0], sorted({word.partition("=")[0] for word in overrides})
        if not reader.first("bench", name, method, *keys):
            return None
        if isinstance(load_recipe(source, overrides), Recipe):
            small.insert(0, "model={path: scenes, dtype: float32, call: {}, compile: false, quantize: null}")
        return [*words, *small, "--repeats", "1"]
    return [*words, *TINY_ROLLOUT, TINY_WINDOW, "evaluate.prompts=2"]


@rule("parts")
@rule("recipes")
@rule("rewards")
@rule("rewards", "new")
@rule("pipelines", "list")
def _as_it_stands(reader: Reader, words: list[str], example: Example) -> list[str]:
    return words


@rule("build", "scenes")
@rule("build", "arithmetic")
def _build(reader: Reader, words: list[str], example: Example) -> list[str] | None:
    """Make the shortest build of a world, with two steps of everything; the same world is built once.

    Of the scenes this takes long, and tests/worlds/test_building.py does it. So here only the call is made.
    """
    world = example.words[2]
    given(["build", world], words)
    if not reader.first("build", world):
        return None
    if world == "scenes":
        with patch.object(building, "build_all", autospec=True) as build:
            build.side_effect = lambda out, **_: out.mkdir(parents=True)
            reader.flowgrpo("build", world, *words)
        build.assert_called_once()
        return None
    return [*words, "--scale", "1e-6"]


# -- pipelines ---------------------------------------------------------------------------------------------------------


@rule("pipelines", "check")
def _check_pipeline(reader: Reader, words: list[str], example: Example) -> list[str]:
    if "--all" in words:
        # tests/pipelines/test_conformance.py checks every class; here only the first two are checked.
        few = dict(list(conformance.TINY.items())[:2])
        reader.patch.setattr(conformance, "TINY", few)
        return words
    told = given(["pipelines", "check"], words)
    if told["what"] is None or told["what"] in conformance.TINY:
        return words
    pictures = [Path(word.partition("=")[2]) for word in words if word.startswith("image=")]
    tiny = conformance.TINY["WanImageToVideoPipeline" if pictures else "StableDiffusion3Pipeline"]
    for path in pictures:
        tiny.call["image"].save(reader.home / path)
    folder = reader.home / told["what"].lstrip("/")
    if not folder.exists():
        tiny.fresh().save_pretrained(folder)
    # The sizes are replaced by the sizes of the tiny pipeline; all other arguments of the page are kept.
    call = {name: value for name, value in tiny.call.items() if name != "image"}
    own = [word for word in words if word != told["what"] and word.partition("=")[0] not in call]
    return [str(folder), *own, *(f"{name}={value}" for name, value in call.items())]


# -- galleries ---------------------------------------------------------------------------------------------------------


@rule("gallery")
def _gallery(reader: Reader, words: list[str], example: Example) -> list[str] | None:
    told = given(["gallery"], words)
    for run in map(str, told["runs"]):
        reader.put_run(run, text="text" in run)
    if told["favourites"] is not None:
        put_marks(reader, Path(told["favourites"]), Path(told["runs"][0]))
    if not told["vote"]:
        return words
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VoteServer, "serve_forever", _vote_twice(seen))
        reader.flowgrpo("gallery", *words)
    assert seen == [200, 200, 200]
    return None


@rule("pairs")
def _pairs(reader: Reader, words: list[str], example: Example) -> list[str]:
    # Two images of a small model seldom differ in their reward, and a pair must.
    told = str(given(["pairs"], words)["samples"])
    scored = [record(0, prompt, seed, float(seed), sample=seed) for prompt in range(4) for seed in range(2)]
    write_run(reader.home / "scored", scored)
    return ["scored" if word == told else word for word in words]


def put_marks(reader: Reader, file: Path, run: Path) -> None:
    """Write the marks of somebody whose favourite is the first sample of the run, as the page saves them."""
    rows = [json.loads(line) for line in RunFolder(reader.home / run).index.read_text(encoding="utf-8").splitlines()]
    first = next(row for row in rows if row["phase"] == "eval")
    place = {"phase": "eval", "prompt": first["prompt"], "seed": str(first["seed"]), "sample": 0, "iteration": None}
    own = {"id": "x", "name": run.name, "folder": run.name, "marks": [place | {"favourite": True, "note": ""}]}
    marks = {"flowgrpo": "marks", "version": 1, "runs": [own]}
    (reader.home / file).write_text(json.dumps(marks), encoding="utf-8")


@rule("watch")
def _watch(reader: Reader, words: list[str], example: Example) -> list[str]:
    reader.put_run(str(given(["watch"], words)["run"]))
    return words


def _vote_twice(seen: list[int]) -> Callable[..., None]:
    """A replacement for the server's loop: it answers a request for the page and two choices, and ends as by Ctrl-C."""
    serve = VoteServer.serve_forever

    def serve_forever(server: VoteServer) -> None:
        answering = threading.Thread(target=serve, args=(server, 0.05))
        answering.start()
        try:
            client = Client(server)
            seen.append(client.get()[0])
            seen.extend(client.vote(pair, "left")[0] for pair in range(2))
        finally:
            server.shutdown()
            answering.join()
        raise KeyboardInterrupt

    return serve_forever


# -- rewards -----------------------------------------------------------------------------------------------------------


@rule("rewards", "show")
def _show_rewards(reader: Reader, words: list[str], example: Example) -> list[str]:
    put_reward_files(reader, words[2:], [])
    return words


@rule("rewards", "check")
def _check_reward(reader: Reader, words: list[str], example: Example) -> list[str]:
    told = given(["rewards", "check"], words)
    put_reward_files(reader, [told["reward"], *(told["against"] or [])], told["options"] or [])
    put_pictures(reader, told["images"])
    if told["data"] is not None and ":" not in told["data"]:
        put_prompts(reader.home / told["data"], text=True, completions=("5", "six", ""))
    small = [*words, "--prompts", "2", "--seeds", "3"]
    if not told["optimise"]:
        return small
    # The short run of the kit is made shorter.
    less = ("evaluate.prompts=4", "evaluate.seeds=1", "rollout.prompts=2")
    reader.patch.setattr(optimise, "load_recipe", lambda source, words: load_recipe(source, [*words, *less]))
    return [*small, "--iterations", "1"]


@rule("rewards", "score")
def _score(reader: Reader, words: list[str], example: Example) -> list[str]:
    told = given(["rewards", "score"], words)
    put_reward_files(reader, told["rewards"], [])
    put_samples(reader, Path(told["samples"]))
    return words


def put_samples(reader: Reader, samples: Path) -> None:
    """Make a list of completions if a file is named, and else pictures."""
    if samples.suffix:
        put_prompts(reader.home / samples, text=True, completions=("3", "4"))
    else:
        put_pictures(reader, samples)


@rule("rewards", "compare")
def _compare(reader: Reader, words: list[str], example: Example) -> list[str]:
    told = given(["rewards", "compare"], words)
    put_reward_files(reader, told["rewards"], [])
    if told["samples"] is not None:
        put_samples(reader, Path(told["samples"]))
    if told["votes"] is not None and not (reader.home / told["votes"]).exists():
        put_votes(reader, str(told["votes"]))
    return [_content_with_few(word) if word.startswith("{name: choices") else word for word in words]


def _content_with_few(entry: str) -> str:
    """A reward of votes that accepts the few votes of the stock, although they do not differ from chance."""
    asked = yaml.safe_load(entry)
    asked["options"] |= {"least": 2, "allow_chance": True}
    return str(yaml.safe_dump(asked, default_flow_style=True)).strip()


def put_votes(reader: Reader, word: str) -> None:
    """Make a file of choices: the file of a run, or a file beside the folder of its run."""
    if word.startswith("runs/"):
        reader.put_run(word)
    else:
        (reader.home / "voted").mkdir(exist_ok=True)
        reader.stock.put_run(reader.home / "voted" / "run")
        # Votes name their run by its path from the folder of the file.
        text = (reader.home / "voted" / "run" / "votes.jsonl").read_text(encoding="utf-8")
        (reader.home / word).write_text(text.replace('"folder": "."', '"folder": "voted/run"'), encoding="utf-8")


@rule("rewards", "serve")
def _serve(reader: Reader, words: list[str], example: Example) -> None:
    told = given(["rewards", "serve"], words)
    reward, options = told["reward"], told["options"] or []
    put_reward_files(reader, [reward], options)
    check_options(resolve(reward), dict(word.split("=", 1) for word in options), reward)
    small = [*words, "--port", "0"]
    if reward == "clip_score":
        # Random weights are loaded in the same way as released weights.
        architecture, weights = save_open_clip(reader.home / "clip", "tiny-served")
        here = {"pretrained=openai": f"pretrained={weights}"}
        if not torch.cuda.is_available():
            here["device=cuda"] = "device=cpu"
        small = [*(here.get(word, word) for word in small), "--options", f"model={architecture}"]
    asked = {} if told["token_env"] is None else {"token_env": told["token_env"]}
    if told["certificate"] is not None:
        # The certificate of a page is for the machine that the page names.
        for path, text in ((told["certificate"], CERTIFICATE), (told["key"], KEY)):
            (reader.home / path).write_text(text, encoding="utf-8")
        asked["ca_file"] = str(reader.home / told["certificate"])
    seen: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_rewards, "say", _ask_and_stop(cli_rewards.say, seen, asked))
        patch.setattr(person, "announce", Marker)  # a program in the place of the person
        reader.flowgrpo("rewards", "serve", *small)
    assert seen["health"] == 200
    assert seen["scores"].shape == (2, 1)
    assert seen["scores"].isfinite().all()


def _ask_and_stop(say: Callable[[str], None], seen: dict[str, Any], options: dict[str, str]) -> Callable[[str], None]:
    """A replacement for `say`: once the server prints its address, ask for its health and for scores, then end it."""

    def ask(address: str) -> None:
        context = ssl.create_default_context(cafile=options.get("ca_file"))
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=20, context=context) as answer:
                seen["health"] = answer.status
            rewards = RewardSet([RewardSpec("remote", options={"url": address, **options})])
            seen["scores"] = rewards.score(torch.rand(2, 3, 32, 32), ["a cat", "a dog"], groups=[0, 1]).values
            rewards.close()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def told(line: str) -> None:
        say(line)
        if (address := re.search(r"https?://\S+", line)) is not None:
            # The certificate of the tests is for the loopback, and a server on all addresses names its machine.
            here = address[0].replace(f"//{socket.gethostname()}:", "//127.0.0.1:")
            threading.Thread(target=ask, args=(here,)).start()

    return told


def put_pictures(reader: Reader, folder: Path | None) -> None:
    """Make a folder of pictures, unless there is one."""
    if folder is not None and str(folder).startswith("runs/"):
        reader.put_run(str(folder))
    elif folder is not None:
        reader.stock.put_pictures(reader.home / folder)


def put_reward_files(reader: Reader, rewards: Sequence[str], options: Sequence[str]) -> None:
    """Write the file of each reward `file.py:name`, unless it exists, from a page that shows it with these options."""
    names = [word.partition("=")[0] for word in options]
    for word in rewards:
        file, _, name = word.removeprefix("./").partition(":")
        if not file.endswith(".py") or not name:
            continue

        def fits(text: str, name: str = name) -> bool:
            defined = re.search(rf"^(?:def|class) {re.escape(name)}\b", text, re.MULTILINE)
            return defined is not None and all(option in text for option in names)

        path = reader.home / file
        if path.exists() and fits(path.read_text(encoding="utf-8")):
            continue
        shown = [other.text for page in PAGES for other in examples(page) if other.file == file and fits(other.text)]
        assert shown, f"no page shows {file} with {name} and {', '.join(names) or 'no options'}"
        path.write_text(shown[0], encoding="utf-8")
