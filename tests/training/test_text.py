"""Language models on the same loop: ratios of 1 at the start, gradients that add, exact resuming, loadable results."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.configs.schema import TextRecipe
from flowgrpo.core.objectives import policy_loss
from flowgrpo.core.surrogates import clip
from flowgrpo.inference.evaluation import evaluate_model
from flowgrpo.text.sampling import Sampled
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session, start
from flowgrpo.training.text.text_policy import Completions
from flowgrpo.training.text.text_task import TextTask
from flowgrpo.training.trainer import Trainer
from tests.training.text_runs import trainer_of

KL = "penalties=[{name: kl, weight: %s}]"


@pytest.fixture
def small(small_text: list[str]) -> list[str]:
    return small_text


def task_of(trainer: Trainer) -> TextTask:
    assert isinstance(trainer.task, TextTask)
    return trainer.task


def gradient(trainer: Trainer, e: Completions, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    trainer.objective.prepare(e)
    rows = torch.tensor(float(trainer.objective.rows(e, 0, None)))
    for batch in trainer.objective.batches(e, 0, None):
        trainer.objective.backward(e, batch, advantages, None, rows)
    found = {n: p.grad.clone() for n, p in trainer.task.weights.named_parameters().items() if p.grad is not None}
    trainer.optimizer.zero_grad(set_to_none=True)
    return found


def made_up(lengths: list[int], ended: list[bool], owner: list[int], **more: object) -> Completions:
    ids = [[3 + k % 9 for k in range(length)] for length in lengths]
    chances = [[-1.0] * length for length in lengths]
    prompts = [[4, 5, 6] for _ in range(max(owner) + 1)]
    return Completions(prompts, Sampled(ids, chances, ended), [""] * len(lengths), owner, **more)


def numbers(run: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.mark.parametrize("more", [(), ("optimizer.updates=3",), ("optimizer.epochs=2", "model.train=full")])
def test_the_ratio_is_exactly_one_before_the_first_update(small: list[str], tmp_path: Path, more: tuple[str]) -> None:
    trainer = trainer_of(small, tmp_path / "run", *more, KL % 0.1)
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["kl"] == 0.0 or more
    again = trainer.iterate(1)
    assert again["ratio/first_error"] == 0.0
    assert again["kl"] > 0
    # Sampling and scoring go different ways through the model, so they agree to rounding.
    assert record["sampler_gap"] < 1e-4


def test_several_updates_move_the_ratio(small: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small, tmp_path / "run", "optimizer.epochs=4")
    record = trainer.iterate(0)
    assert record["log_ratio_sq"] > 0
    assert set(record["steps"]) <= {str(k) for k in range(8)}
    assert record["steps"]["0"]["count"] > 0


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("objective.reduce=sequence",),
        ("objective.reduce=sum", "objective.constant=true"),
        ("objective.level=sequence", "objective.reduce=sequence"),
        (KL % 0.3, "optimizer.epochs=2"),
    ],
)
def test_micro_batches_add(small: list[str], tmp_path: Path, more: tuple[str]) -> None:
    found = []
    for tokens in (10_000, 60, 1):
        trainer = trainer_of(small, tmp_path / f"run-{tokens}", f"rollout.tokens={tokens}", *more)
        rows, e = trainer.collect(0)
        advantages = trainer.advantages(trainer.score(trainer.rewards, rows, e), e, rows)
        found.append(gradient(trainer, e, advantages))
    largest = max(float(g.abs().max()) for g in found[0].values())
    assert largest > 0
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.allclose(value, other[name], atol=2e-5 * largest), name


def test_batches_hold_whole_groups_within_the_budget(small: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small, tmp_path / "run", "rollout.tokens=40")
    e = made_up([2, 2, 2, 2, 5, 5, 1, 1], [True] * 8, [0, 0, 1, 1, 2, 2, 3, 3])
    # Groups of 2·(3+2) = 10 tokens: two fit in 40, and with the third all six rows would be padded to 8: 48.
    assert list(trainer.objective.batches(e, 0, None)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    tight = trainer_of(small, tmp_path / "tight", "rollout.tokens=10")
    assert list(tight.objective.batches(e, 0, None)) == [[0, 1], [2, 3], [4], [5], [6, 7]]
    assert trainer.objective.rows(e, 0, None) == 20
    two = made_up([2, 2, 2, 2], [True] * 4, [0, 0, 1, 1], updates=2)
    assert [list(trainer.objective.batches(two, part, None)) for part in (0, 1)] == [[[0, 1]], [[2, 3]]]


def test_denominators(small: list[str], tmp_path: Path) -> None:
    e = made_up([2, 6, 4, 6], [True, False, True, False], [0, 0, 1, 1])
    cut = made_up([2, 6, 4, 6], [True, False, True, False], [0, 0, 1, 1], drop_truncated=True)
    keep = torch.tensor([True, True, False, True])
    for more, whole, ended, kept in (
        (("objective.reduce=token",), 18, 6, 14),
        (("objective.reduce=sequence",), 4, 2, 3),
        (("objective.reduce=sum",), 4, 2, 3),
        (("objective.reduce=sum", "objective.constant=true"), 24, 12, 18),
    ):
        objective = trainer_of(small, tmp_path / str(whole) / more[0][-3:], *more).objective
        assert objective.rows(e, 0, None) == whole
        assert objective.rows(cut, 0, None) == ended
        assert objective.rows(e, 0, keep) == kept


def test_the_loss_is_that_of_the_core(small: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small, tmp_path / "run", "rollout.tokens=10000", "optimizer.epochs=2")
    rows, e = trainer.collect(0)
    advantages = trainer.advantages(trainer.score(trainer.rewards, rows, e), e, rows)
    task = task_of(trainer)
    everything = list(range(12))
    with torch.no_grad():
        old, mask = task.policy.log_probs(e, everything)
    trainer.objective.prepare(e)
    trainer.update(e, advantages)
    outcome = trainer.objective.backward(e, everything, advantages, None, torch.tensor(7.0))
    new, _ = task.policy.log_probs(e, everything)
    loss, metrics = policy_loss(
        new, old, advantages, mask, surrogate=lambda *a: clip(*a, low=0.2, high=0.28), denom=7.0
    )
    assert torch.allclose(outcome.metrics["loss"], metrics["loss"])
    assert torch.allclose(outcome.metrics["ratio"], metrics["ratio"])
    mine = {n: p.grad.clone() for n, p in task.weights.named_parameters().items()}
    trainer.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    for name, parameter in task.weights.named_parameters().items():
        assert torch.allclose(mine[name], parameter.grad, atol=1e-6), name


def test_truncated_completions_leave_every_statistic(small: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small, tmp_path / "run", "objective.drop_truncated=true")
    rows, e = trainer.collect(0)
    assert 0 < int(e.outcomes.sum()) < 12
    assert e.outcomes.tolist() == e.sampled.ended
    scores = trainer.score(trainer.rewards, rows, e)
    advantages = trainer.advantages(scores, e, rows)
    assert (advantages[~e.outcomes] == 0).all()
    for group in range(3):
        mine = e.outcomes & (e.groups == group)
        assert float(advantages[mine].sum()) == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_a_run_resumes_to_the_bit(small: list[str], tmp_path: Path) -> None:
    # A schedule would depend on the number of iterations, by which the second run is cut short here.
    more = ("optimizer.ema={decay: 0.5}", KL % 0.05, "optimizer.updates=3", "optimizer.schedule=constant")
    whole = trainer_of(small, tmp_path / "whole", *more)
    whole.train()
    broken = trainer_of(small, tmp_path / "broken", *more, "run.iterations=2")
    broken.train()
    recipe = load_recipe("text", [*small, *more])
    for file in (tmp_path / "broken" / "lora").iterdir():
        file.unlink()
    (tmp_path / "broken" / "lora").rmdir()
    again = Session(recipe, RunFolder(tmp_path / "broken")).trainer(Silent())
    again.resume()
    assert again.next_iteration == 2
    again.train()
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "broken")
    one, two = (load_file(tmp_path / name / "lora" / "adapter_model.safetensors") for name in ("whole", "broken"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    index = [(tmp_path / name / "samples" / "index.jsonl").read_text() for name in ("whole", "broken")]
    assert index[0] == index[1]


@pytest.mark.slow
def test_an_adapter_loads_with_plain_peft_and_a_model_with_plain_transformers(
    small: list[str], random_language_folder: Path, tmp_path: Path
) -> None:
    ids = torch.tensor([[4, 5, 6, 7]])
    for kind, name in (("lora", "lora"), ("full", "model")):
        trainer = trainer_of(small, tmp_path / kind, f"model.train={kind}", "run.iterations=2", "optimizer.ema=null")
        trainer.train()
        with torch.no_grad():
            mine = task_of(trainer).policy.language.model(ids).logits
            folder = tmp_path / kind / name
            if kind == "lora":
                base = AutoModelForCausalLM.from_pretrained(random_language_folder)
                assert not torch.allclose(base(ids).logits, mine, atol=1e-4)
                loaded = PeftModel.from_pretrained(base, folder).eval()
            else:
                loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
            assert torch.allclose(loaded(ids).logits, mine, atol=1e-5)


@pytest.mark.slow
def test_samples_are_recorded_with_their_completions(small: list[str], tmp_path: Path) -> None:
    trainer_of(small, tmp_path / "run").train()
    records = [json.loads(line) for line in (tmp_path / "run" / "samples" / "index.jsonl").read_text().splitlines()]
    evaluated = [r for r in records if r["phase"] == "eval"]
    assert [r["iteration"] for r in evaluated] == [0] * 5 + [2] * 5 + [4] * 5
    assert all(isinstance(r["completion"], str) and "image" not in r for r in records)
    assert [r["seed"] for r in records if r["phase"] == "train"][:5] == [0, 1, 2, 3, 0]
    assert all(r["rewards"].keys() == {"nines"} for r in records)


def test_training_raises_the_reward(small: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(
        small, tmp_path / "run", "rollout={prompts: 8, group: 8, batch: 64, tokens: 4096}", "run.iterations=25",
        "data.heldout=null",
    )  # fmt: skip
    first = [trainer.iterate(k)["reward/nines"] for k in range(25)]
    assert sum(first[-5:]) / 5 > sum(first[:3]) / 3 + 1.0


def test_the_random_model_is_that_of_the_seed(tmp_path: Path) -> None:
    states = []
    for seed in (0, 0, 1):
        recipe = load_recipe("text", ["model.path=arithmetic:untrained", f"run.seed={seed}"])
        task = Session(recipe).task
        states.append(task.weights.state_dict())
    name = next(iter(states[0]))
    assert torch.equal(states[0][name], states[1][name])
    assert not torch.equal(states[0][name], states[2][name])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.group=1", "group of one"),
        ("credit=depth", "denoising tree"),
        ("objective.constant=true", "use objective.reduce sum"),
        ("generation.top_k=1", "generation.top_k: .* greater than or equal to 2"),
        ("objective.levle=token", "no option 'levle'; did you mean 'level'"),
        ("sampler.steps=10", "unknown key 'sampler'"),
        ("optimizer.updates=99", "whole groups"),
        ("task=sound", "write one of images, text, masked"),
    ],
)
def test_what_does_not_go_together_is_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("text", [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["generation.max_prompt_tokens=3"], r"prompt \d+ has \d tokens; generation.max_prompt_tokens is 3"),
        (["model.chat=true"], "no chat template"),
        (["model.system=Be brief."], "no chat template"),
        (["model.path=/nowhere/at/all"], "is not a folder"),
        (["rewards=[{name: jpeg_compressibility}]"], "scores `images`, but the samples here are completions"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(small: list[str], overrides: list[str], message: str) -> None:
    recipe = load_recipe("text", [*small, *overrides])
    assert isinstance(recipe, TextRecipe)
    with pytest.raises(ValueError, match=message):
        Session(recipe)


def test_conversations_go_through_the_chat_template(
    small: list[str], random_language_folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "chat"
    tokenizer_folder = Session(load_recipe("text", small)).task.policy.language.tokenizer
    tokenizer_folder.chat_template = (
        "{% for m in messages %}{{ '+' if m.role == 'user' else '-' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    AutoModelForCausalLM.from_pretrained(random_language_folder).save_pretrained(model)
    tokenizer_folder.save_pretrained(model)
    prompts = tmp_path / "talk.jsonl"
    talk = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}, {"role": "user", "content": "45"}]
    prompts.write_text(json.dumps({"prompt": talk, "answer": "9"}) + "\n" + json.dumps({"prompt": "7"}) + "\n" * 2)
    overrides = [*small, f"data.train={prompts}", "data.heldout=null", "rollout.prompts=2"]
    with pytest.raises(ValueError, match="no chat template"):
        Session(load_recipe("text", overrides))
    session = Session(load_recipe("text", [*overrides, f"model.path={model}", "model.system='99'"]))
    language = session.task.policy.language
    row, plain = session.data.train.rows
    assert row.text == "45"
    assert language.decode(language.encode(row.text, row.messages)) == "-99+12-3+45="
    assert language.decode(language.encode(plain.text, plain.messages)) == "-99+7="
    begun = [{"role": "user", "content": "8"}, {"role": "assistant", "content": "6"}]
    assert language.decode(language.encode("8", begun)) == "-99+8-6"
    tokenizer_folder.chat_template += "{% if thinks %}9{% endif %}{% if 0 %}{{ raise_exception('no') }}{% endif %}"
    tokenizer_folder.save_pretrained(model)
    words = [*overrides, f"model.path={model}"]
    thinking = Session(load_recipe("text", [*words, "model.chat_template_kwargs={thinks: true}"]))
    language = thinking.task.policy.language
    assert language.decode(language.encode(plain.text, plain.messages)) == "+7=9"
    for value, message in (
        ("{thinsk: true}", r"does not read 'thinsk'; did you mean 'thinks'\? It reads thinks\."),
        ("{add_generation_prompt: false}", "add_generation_prompt is set for each prompt; leave it out"),
        ("{tokenize: true}", "tokenize is set for each prompt; leave it out"),
    ):
        with pytest.raises(ValueError, match=message):
            Session(load_recipe("text", [*words, f"model.chat_template_kwargs={value}"]))
    with pytest.raises(ValueError, match=r"model.chat_template_kwargs is given, but the tokenizer .* no chat template"):
        Session(load_recipe("text", [*small, "model.chat_template_kwargs={thinks: true}"]))
    with pytest.raises(RecipeError, match="chat is false, and system and chat_template_kwargs need the chat template"):
        load_recipe("text", ["model.chat=false", "model.chat_template_kwargs={thinks: true}"])
    with pytest.raises(ValueError, match="which only language models read"):
        Session(load_recipe("mixgrpo_flash_guard", [f"data.train={prompts}", "data.heldout=null", "rollout.prompts=2"]))


def test_experts_without_a_lora_are_noted(small_text: list[str], tmp_path: Path) -> None:
    import transformers as t

    recipe = load_recipe("text", small_text)
    tokenizer = t.AutoTokenizer.from_pretrained(recipe.model.path)
    config = t.Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = t.Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "experts")
    tokenizer.save_pretrained(tmp_path / "experts")
    session = Session(load_recipe("text", [*small_text, f"model.path={tmp_path / 'experts'}", "model.train=lora"]))
    stacked = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    found = [note for note in session.notes if "experts" in note]
    # transformers 4 has a linear layer for each expert, so the LoRA is on all of them.
    assert len(found) == bool(stacked)
    assert all(f"such as {stacked[0]}: these stay" in note for note in found)
    plain = Session(load_recipe("text", small_text))
    assert not any("experts" in note for note in plain.notes)


@pytest.mark.parametrize("recipe", ["text", "masked"])
def test_long_training_prompts_are_left_out_if_the_recipe_says_so(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "answer": "3"}) + "\n" for text in ("1+2=", "1+1+1=", "2+1=", "1" * 400))
    )
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    words = [
        f"data.train={tmp_path}/train.jsonl", f"data.heldout={tmp_path}/held.jsonl", "generation.max_prompt_tokens=5",
        "rollout.prompts=2", "run.iterations=1",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"train.jsonl: prompt 2 has [67] tokens; .* or write .*long_prompts: drop"):
        Session(load_recipe(recipe, words))
    words.append("generation.long_prompts=drop")
    session = Session(load_recipe(recipe, words))
    assert [row.text for row in session.data.train.rows] == ["1+2=", "2+1="]
    said = f"2 of 4 prompts of {tmp_path}/train.jsonl are left out, because they have more than 5 tokens"
    assert str(session.notes).count(said) == 1
    with pytest.raises(ValueError, match=r"rollout.prompts is 3, but without the long prompts .*/train.jsonl holds 2;"):
        Session(load_recipe(recipe, [*words, "rollout.prompts=3"]))
    with pytest.raises(ValueError, match=r"all prompts have more tokens than generation.max_prompt_tokens 2; raise it"):
        Session(load_recipe(recipe, [*words, "generation.max_prompt_tokens=2"]))
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+1+1=", "answer": "3"}\n')
    with pytest.raises(ValueError, match=r"held.jsonl: prompt 1 has . tokens; .*: raise it, or leave out the prompt$"):
        Session(load_recipe(recipe, words))


def test_a_completion_without_room_in_the_model_is_refused_before_the_run(
    small_text: list[str], tmp_path: Path
) -> None:
    import transformers as t

    recipe = load_recipe("text", small_text)
    tokenizer = t.AutoTokenizer.from_pretrained(recipe.model.path)
    config = t.GPT2Config(vocab_size=len(tokenizer), n_positions=16, n_embd=16, n_layer=1, n_head=2)
    t.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    words = [*small_text, f"model.path={tmp_path / 'gpt2'}", "model.train=full"]
    with pytest.raises(
        ValueError, match=r"arithmetic:train: prompt 1: .* positions for 17 tokens in all; set generation"
    ):
        start(load_recipe("text", [*words, "generation.max_tokens=16"]), tmp_path / "no")
    trainer = start(load_recipe("text", [*words, "generation.max_tokens=6"]), tmp_path / "yes").trainer(Silent())
    assert trainer.iterate(0)["ratio/first_error"] == 0.0


@pytest.mark.slow
def test_a_text_of_the_recipe_ends_completions_in_rollouts_and_evaluations(
    small_text: list[str], tmp_path: Path
) -> None:
    words = [*small_text, "generation.stop=['1', '2', '3']", "run={iterations: 1, sample_every: 1}"]
    start(load_recipe("text", words), tmp_path / "run").trainer(Silent()).train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples" / "index.jsonl").open()]
    assert {line["phase"] for line in lines} == {"train", "eval"}
    for line in lines:
        assert not set(line["completion"][:-1]) & {"1", "2", "3"}
    assert any(line["completion"][-1:] in {"1", "2", "3"} for line in lines)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert records[0]["ratio/first_error"] < 1e-6
    with pytest.raises(RecipeError, match=r"generation.stop.0"):
        load_recipe("text", ["generation.stop=['']"])


@pytest.mark.slow
def test_rewards_that_name_them_get_the_tokens_and_whether_a_completion_was_cut(
    small_text: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "SEEN = []\n\n\n"
        "def named(completions, completion_ids, truncated):\n"
        "    SEEN.append((completions, completion_ids, truncated))\n"
        "    return [len(ids) / 10 - cut for ids, cut in zip(completion_ids, truncated)]\n\n\n"
        "def anything(completions, **columns):\n"
        "    assert not {'completion_ids', 'truncated'} & columns.keys(), columns\n"
        "    return [0.0] * len(completions)\n\n\n"
        "def on_images(images, completion_ids, truncated):\n    return [0.0] * len(images)\n"
    )
    words = [
        *small_text, f"rewards=[{{name: '{file}:named'}}, {{name: '{file}:anything'}}]", "evaluate.rewards=null",
        "generation.max_tokens=3", "run.iterations=1",
    ]  # fmt: skip
    session = start(load_recipe("text", words), tmp_path / "run")
    session.trainer(Silent()).train()
    language, seen = session.task.policy.language, session.rewards.rewards[0].function.__globals__["SEEN"]
    assert len(seen) >= 2
    for completions, ids, truncated in seen:
        for text, own, cut in zip(completions, ids, truncated, strict=True):
            assert language.decode(own) == text
            assert 1 <= len(own) <= 3
            assert cut == (own[-1] not in language.ends)
    assert {cut for *_, truncated in seen for cut in truncated} == {True, False}
    # The same outside a run; pictures have no tokens.
    found = evaluate_model(str(tmp_path / "run"), load_recipe("text", words))
    assert found["named"][2] > 0
    with pytest.raises(ValueError, match="takes `completion_ids`, `truncated`, which the prompts do not have"):
        Session(load_recipe("mixgrpo", [f"rewards=[{{name: '{file}:on_images'}}]"]))
