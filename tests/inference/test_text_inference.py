"""Completions and scores of a language model outside a run: addressed, as in the run itself, never overwritten."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.inference.evaluation import evaluate_model
from flowgrpo.inference.text_inference import iterations_done, sample_texts, task_of
from flowgrpo.text.model import load_language_model
from flowgrpo.text.sampling import sample_completions
from flowgrpo.training.data import PromptRow, read_prompts
from flowgrpo.training.session import start
from flowgrpo.training.text import text_policy
from tests.conftest import Command

ROWS = [PromptRow(0, "1+2="), PromptRow(1, "47-85=")]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "sums.jsonl"
    lines = [{"prompt": f"{k}+{2 * k}=", "answer": str(3 * k), "note": "sum"} for k in range(1, 7)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module", params=["lora", "full"])
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, random_language_folder: Path,
    prompts: Path,
) -> Path:  # fmt: skip
    """A short run with a strong learning rate."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    overrides = [
        f"model={{path: {random_language_folder}, train: {request.param}}}", "rewards=[{name: digit_share}]",
        f"data={{train: {prompts}, heldout: {prompts}}}", "rollout={prompts: 3, group: 4, batch: 8}",
        "generation.max_tokens=6", "run={iterations: 3, checkpoint_every: 3, sample_every: 2}",
        "evaluate={every: 3, seeds: 2, temperature: 0.5}", "optimizer={learning_rate: 0.03, ema: {decay: 0.5}}",
    ]  # fmt: skip
    start(load_recipe("text", overrides), folder).trainer(Silent()).train()
    return folder


def lines_of(index: Path) -> list[dict]:
    return [json.loads(line) for line in index.read_text().splitlines()]


def test_a_completion_depends_on_its_place_and_seed_alone(random_language_folder: Path, tmp_path: Path) -> None:
    model = str(random_language_folder)
    settings = ["generation.max_tokens=6"]
    index, _ = sample_texts(model, ROWS, tmp_path / "all", seed=0, count=4, overrides=settings)
    everything = lines_of(index)
    assert [(r["prompt_id"], r["seed"]) for r in everything] == [(p, k) for p in range(2) for k in range(4)]
    assert len({r["completion"] for r in everything}) > 4
    later = lines_of(sample_texts(model, ROWS, tmp_path / "one", seed=3, overrides=settings)[0])
    assert [r["completion"] for r in later] == [everything[k]["completion"] for k in (3, 7)]
    assert [r["seed"] for r in later] == [3, 3]
    alone = lines_of(sample_texts(model, ROWS[:1], tmp_path / "alone", seed=1, overrides=settings)[0])
    assert alone[0]["completion"] == everything[1]["completion"]


def test_batches_are_written_as_they_are_made_and_equal_the_whole(random_language_folder: Path, tmp_path: Path) -> None:
    model, settings = str(random_language_folder), ["generation.max_tokens=6"]
    rows = [PromptRow(place, f"{place}+1=") for place in range(5)]
    index, texts = sample_texts(model, rows, tmp_path / "whole", seed=2, count=2, overrides=settings)
    whole = lines_of(index)
    assert [r["sample"] for r in whole] == list(range(10))
    assert [r["completion"] for r in whole] == texts
    small = [*settings, "evaluate.batch=4"]
    written = []

    def stop_in_time(*_: object) -> None:
        written.append(len(lines_of(tmp_path / "stopped" / "index.jsonl")))
        if len(written) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample_texts(model, rows, tmp_path / "stopped", seed=2, count=2, overrides=small, made=stop_in_time)
    assert written == [4, 8]
    assert lines_of(tmp_path / "stopped" / "index.jsonl") == whole[:8]
    assert lines_of(sample_texts(model, rows, tmp_path / "parts", seed=2, count=2, overrides=small)[0]) == whole


@pytest.mark.slow
def test_completions_before_an_interruption_are_kept(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(finished / "config.yaml", ["evaluate.batch=4"])  # two prompts with two completions each
    evaluate_model(str(finished), recipe, out=tmp_path / "whole")
    whole = lines_of(tmp_path / "whole" / "index.jsonl")
    batches = list[object]()

    def stopped(*given: Any, **settings: Any) -> Any:
        if len(batches) == 2:
            raise KeyboardInterrupt
        batches.append(given)
        return sample_completions(*given, **settings)

    monkeypatch.setattr(text_policy, "sample_completions", stopped)
    with pytest.raises(KeyboardInterrupt):
        evaluate_model(str(finished), recipe, out=tmp_path / "stopped")
    kept = lines_of(tmp_path / "stopped" / "index.jsonl")
    assert len(kept) == 8
    assert [{**line, "rewards": 0} for line in kept] == [{**line, "rewards": 0} for line in whole[:8]]
    assert all(line["rewards"] == {} for line in kept)
    assert [(line["prompt_id"], line["seed"], line["sample"]) for line in kept[:3]] == [(0, 0, 0), (0, 1, 1), (1, 0, 2)]


def test_lengths_filters_and_temperature_are_taken(random_language_folder: Path, tmp_path: Path) -> None:
    model = str(random_language_folder)

    def made(name: str, temperature: float | None = None, **settings: float) -> list[str]:
        keys = [f"generation.{key}={value}" for key, value in settings.items()]
        return sample_texts(model, ROWS, tmp_path / name, count=6, temperature=temperature, overrides=keys)[1]

    likeliest = made("cold", temperature=0.0, max_tokens=5)
    assert len(set(likeliest[:6])) == len(set(likeliest[6:])) == 1
    # So narrow a filter leaves only the likeliest token.
    assert made("narrow", max_tokens=5, top_p=1e-9) == likeliest
    wide = made("wide", max_tokens=5)
    assert len(set(wide)) > 6
    assert made("two", max_tokens=5, top_k=2) != wide
    assert all(short == whole[: len(short)] for short, whole in zip(made("short", max_tokens=2), wide, strict=True))
    assert made("warm", max_tokens=5, temperature=0.5) != wide
    with pytest.raises(ValueError, match=r"generation\.top_p"):
        made("never", top_p=0.0)
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_records_have_the_fields_of_a_runs_own(finished: Path, prompts: Path, tmp_path: Path) -> None:
    own = lines_of(finished / "samples" / "index.jsonl")[0]
    index, _ = sample_texts(str(finished), read_prompts(str(prompts)), tmp_path / "new")
    [first, *_] = records = lines_of(index)
    assert list(first) == list(own)
    assert first["columns"] == {"answer": "3", "note": "sum"}
    assert (first["phase"], first["rewards"]) == ("sample", {})
    assert len(records) == 6
    assert {r["iteration"] for r in records} == {3}
    # As long as the run's completions, and not as long as a plain model's.
    assert max(len(r["completion"]) for r in records) <= 6


@pytest.mark.slow
def test_an_evaluation_repeats_that_of_the_run(finished: Path, tmp_path: Path) -> None:
    recipe = load_recipe(finished / "config.yaml")
    own = lines_of(finished / "samples" / "index.jsonl")
    metrics = lines_of(finished / "metrics.jsonl")
    for base, iteration in ((True, 0), (False, 3)):
        out = tmp_path / str(iteration)
        mean, error, count = evaluate_model(str(finished), recipe, out=out, base=base)["digit_share"]
        assert count == 12
        [record] = [r for r in metrics if r["iteration"] == iteration]
        assert mean == record["eval/digit_share"]
        assert error == record["eval_error/digit_share"] > 0
        wanted = [r for r in own if r["phase"] == "eval" and r["iteration"] == iteration]
        assert lines_of(out / "index.jsonl") == wanted
    answers = [[r["completion"] for r in lines_of(tmp_path / name / "index.jsonl")] for name in ("0", "3")]
    assert answers[0] != answers[1]


@pytest.mark.slow
def test_the_base_of_a_run_is_the_model_it_began_with(
    finished: Path, random_language_folder: Path, tmp_path: Path
) -> None:
    def made(name: str, model: Path, base: bool) -> list[str]:
        settings = ["generation.max_tokens=6"]
        found = sample_texts(str(model), ROWS, tmp_path / name, count=4, overrides=settings, base=base)
        assert {r["iteration"] for r in lines_of(found[0])} == {0 if base or model != finished else 3}
        return found[1]

    plain = made("plain", random_language_folder, False)
    assert made("base", finished, True) == plain
    assert made("tuned", finished, False) != plain
    with pytest.raises(ValueError, match="is not a run"):
        made("never", random_language_folder, True)


@pytest.mark.slow
def test_what_a_run_has_trained_cannot_be_changed(finished: Path, tmp_path: Path) -> None:
    own = load_recipe(finished / "config.yaml", rewards=False)
    other = "full" if own.model.train == "lora" else "lora"
    with pytest.raises(ValueError, match=r"model\.train says which weights are trained"):
        sample_texts(str(finished), ROWS, tmp_path / "trained", overrides=[f"model.train={other}"])
    words = ["model.path=arithmetic:untrained", "generation.max_tokens=2"]
    if own.model.train == "full":
        with pytest.raises(ValueError, match=r"leave model\.path out, or add --base"):
            sample_texts(str(finished), ROWS, tmp_path / "moved", overrides=words)
    sample_texts(str(finished), ROWS, tmp_path / "base", overrides=words, base=True)


@pytest.mark.slow
def test_nothing_is_overwritten(random_language_folder: Path, finished: Path, tmp_path: Path) -> None:
    settings = ["generation.max_tokens=2"]
    index, _ = sample_texts(str(random_language_folder), ROWS, tmp_path, overrides=settings)
    before = index.read_text()
    with pytest.raises(ValueError, match=r"index\.jsonl exists; name another folder with --out"):
        sample_texts("/nowhere", ROWS, tmp_path)
    with pytest.raises(ValueError, match=r"index\.jsonl exists; name another folder with --out"):
        evaluate_model(str(finished), load_recipe(finished / "config.yaml"), out=tmp_path)
    assert index.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["index.jsonl"]


def test_iterations_behind_the_weights(tmp_path: Path) -> None:
    assert iterations_done(str(tmp_path)) == 0
    metrics, config = tmp_path / "metrics.jsonl", tmp_path / "config.yaml"
    config.write_text(dump_recipe(load_recipe("default", ["evaluate.results=last"])))
    for lines, wanted in (
        ([], 0),
        ([{"iteration": 0, "reward/total": 0.1}, {"iteration": 1, "reward/total": 0.1}], 2),
        ([{"iteration": 0, "reward/total": None}, {"iteration": 1, "eval/x": 0.5}], 1),
    ):
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert iterations_done(str(tmp_path)) == wanted
    with metrics.open("a") as handle:
        handle.write('{"iteration": 7, "lo')
    assert iterations_done(str(tmp_path)) == 1
    # A run that keeps the weights of its best evaluation says beside them which one it was.
    (tmp_path / "best.json").write_text('{"iteration": 0}')
    assert iterations_done(str(tmp_path)) == 1
    config.write_text(dump_recipe(load_recipe("default", ["evaluate.results=best"])))
    assert iterations_done(str(tmp_path)) == 0


@pytest.mark.slow
def test_what_a_model_makes(random_language_folder: Path, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    found = [str(random_language_folder), str(finished), "arithmetic", "arithmetic:untrained"]
    assert [task_of(model) for model in found] == ["text"] * 4
    assert [task_of(model) for model in ("scenes", str(tmp_path), "some/model")] == ["images", "images", None]
    with pytest.raises(ValueError, match="makes text, but mixgrpo_flash_guard is a recipe of images"):
        evaluate_model("arithmetic", load_recipe("mixgrpo_flash_guard"))


def test_the_command_prints_completions_below_their_prompts(
    command: Command, random_language_folder: Path, prompts: Path
) -> None:
    words = ("--model", str(random_language_folder), "--max-tokens", "4", "--count", "2", "--seed", "5")
    status, output, errors = command("sample", "1+2=", "9", *words, "--temperature", "0.7", "--out", "one")
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    assert [line for line in lines if line.startswith("prompt")] == ["prompt 1: 1+2=", "prompt 2: 9"]
    records = lines_of(Path("one/index.jsonl"))
    heads = [k for k, line in enumerate(lines) if line.startswith("  seed ")]
    assert [lines[k + 1].strip() for k in heads] == [r["completion"].strip() for r in records]
    assert [lines[k].split(",")[0] for k in heads] == ["  seed 5", "  seed 6"] * 2
    assert any(line.endswith("4 tokens, cut there:") for line in lines)
    assert lines[-1] == "written to one/index.jsonl"
    status, _, errors = command("sample", "1+2=", *words, "--out", "one")
    assert status == 1
    assert "one/index.jsonl exists" in errors
    status, output, _ = command("sample", "--file", str(prompts), *words, "--out", "two")
    assert status == 0
    assert len(lines_of(Path("two/index.jsonl"))) == 12


@pytest.mark.slow
def test_the_command_evaluates_a_run_by_its_own_recipe(command: Command, finished: Path, prompts: Path) -> None:
    status, output, errors = command("evaluate", str(finished), "--out", "held")
    assert (status, errors) == (0, "")
    said = output.splitlines()
    assert said[0] == f"{finished}: 6 prompts of {prompts}, 12 samples, scored by digit_share"
    assert said[1] == "float32, temperature 0.5, at most 6 tokens, batch 8"
    assert said[2].startswith("8 of 12 samples")
    assert said[-2].startswith("digit_share: ")
    assert said[-2].endswith("(12 completions)")
    assert len(lines_of(Path("held/index.jsonl"))) == 12
    status, output, _ = command("evaluate", str(finished), "evaluate.prompts=2", "--base")
    assert "(4 completions)" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample", "--model", "arithmetic"], "no prompt is given"),
        (["sample", "1+1=", "--file", "x.txt", "--model", "arithmetic"], "give only one of the two"),
        (["sample", "1+1=", "--model", "arithmetic", "--steps", "3"], "--steps is not for text"),
        (["sample", "a star", "--top-p", "0.5"], "--top-p is not for images"),
        (["sample", "a star", "--model", "some/model", "--max-tokens", "3"], "write --task text as well"),
        (["sample", "a star", "--task", "text"], "--task is text, but scenes makes images"),
        (["sample", "a star", "--task", "sound"], "use images, text or masked"),
        (["sample", "1+1=", "--model", "arithmetic", "--base"], "is not a run"),
        (["sample", "a star", "--base"], "is not a run"),
        (["sample", "1+1=", "--model", "arithmetic", "--dtype", "int8"], "model.dtype"),
        (["evaluate", "some/model"], "it has no prompts and rewards for an evaluation; name a recipe"),
        (
            ["evaluate", "arithmetic", "data.heldout=null"],
            "is null, but an evaluation needs held-out prompts; name a file with data.heldout=FILE",
        ),
    ],
)
def test_what_cannot_be_done_is_said(command: Command, words: list[str], message: str) -> None:
    status, _, errors = command(*words)
    assert status == 1
    assert message in errors
    assert not Path("samples").exists()


def test_a_masked_model_samples_fewer_tokens_in_as_many_steps_as_asked(command: Command, tmp_path: Path) -> None:
    words = ("sample", "1+2=", "--model", "arithmetic:masked", "--max-tokens", "3", "--out", str(tmp_path / "a"))
    status, _, errors = command(*words)
    assert status == 1
    assert "use at most 3 steps" in errors
    status, shown, errors = command(*words, "--steps", "3")
    assert (status, errors) == (0, "")
    assert "3 tokens in 3 steps" in shown


def test_a_chat_template_that_refuses_is_named(random_language_folder: Path) -> None:
    language = load_language_model(str(random_language_folder))
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    language.tokenizer.chat_template = refuses
    with pytest.raises(ValueError, match=r"the chat template .* refuses a prompt: no system; check the roles"):
        replace(language, chat=True, system="be brief").encode("1+2=")


@pytest.mark.slow
def test_a_form_of_evaluations_is_used_and_another_is_not(random_language_folder: Path, tmp_path: Path) -> None:
    """With turns, the calculator's answer is in the completions, and a completion still depends on its seed alone."""
    model, settings = str(random_language_folder), ["generation.max_tokens=30"]
    plain = lines_of(sample_texts(model, ROWS, tmp_path / "plain", count=4, overrides=settings)[0])
    hints = [*settings, "rollout.form=hints"]
    assert lines_of(sample_texts(model, ROWS, tmp_path / "hints", count=4, overrides=hints)[0]) == plain
    told = [*settings, "rollout.form={name: turns, begin: '', end: l, answer: ' {answer} ', calls: 2}"]
    index, found = sample_texts(model, ROWS, tmp_path / "turns", count=4, overrides=told)
    turns = lines_of(index)
    assert [(r["prompt_id"], r["seed"]) for r in turns] == [(p, k) for p in range(2) for k in range(4)]
    called = [r for r in turns if "calls" in r]
    assert called
    assert all("l error " in r["completion"] for r in called)
    assert found == [r["completion"] for r in turns]
    later = lines_of(sample_texts(model, ROWS, tmp_path / "one", seed=3, overrides=told)[0])
    assert [r["completion"] for r in later] == [turns[k]["completion"] for k in (3, 7)]


def test_a_form_that_makes_more_than_was_asked_is_refused(
    random_language_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from flowgrpo.parts.traits import in_evaluations\n@in_evaluations\ndef two(writer):\n"
        "    return writer.write(writer.starts(count=2))\n"
    )
    with pytest.raises(ValueError, match="form two made 4 completions where 2 were asked"):
        sample_texts(str(random_language_folder), ROWS, tmp_path / "out", overrides=["rollout.form=mine.py:two"])
