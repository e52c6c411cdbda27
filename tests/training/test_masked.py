"""Masked language models on the same loop: first ratios of 1, trees, resuming to the bit, results that load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, dump_recipe, load_recipe
from flowgrpo.inference.kept_samples import KeptSamples
from flowgrpo.text.masked_model import load_masked_model
from flowgrpo.text.positions import room_of
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.masked.masked_task import MaskedTask
from flowgrpo.training.reporting.clock import Clock
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer
from flowgrpo.worlds.arithmetic.masked_building import MASK, build_masked_model
from flowgrpo.worlds.arithmetic.problems import build_character_tokenizer, save_tokenizer
from tests.simulated import simulated_device
from tests.training import ranks

KL = "penalties=[{name: kl, weight: 0.05}]"
RECIPES = (
    "masked", "diffu_grpo", "coupled_grpo", "gdpo_masked", "uni_grpo", "wd1", "masked_branch", "masked_window",
    "co_grpo", "trace_rl", "spg",
)  # fmt: skip


def masked_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = build_character_tokenizer()
    tokenizer.add_special_tokens({"mask_token": MASK})
    return tokenizer


def saved(model: Any, folder: Path) -> Path:
    """A random model with larger weights than a new one has, so that its distributions are far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    save_tokenizer(masked_tokenizer(), folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = build_masked_model(len(masked_tokenizer()), width=32, layers=2, heads=2)
    return saved(model, tmp_path_factory.mktemp("masked") / "model")


@pytest.fixture
def small(folder: Path, tmp_path: Path) -> list[str]:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def nines(completions, prompts, **columns):\n"
        "    return [text.count('9') - 0.1 * len(text) for text in completions]\n"
    )
    return [
        f"model.path={folder}", f"rewards=[{{name: '{reward}:nines'}}]", "rollout={prompts: 3, group: 16, batch: 8}",
        "model.train=lora", "evaluate={every: 2, prompts: 5}", "optimizer.learning_rate=0.01", "optimizer.warmup=0",
        "optimizer.schedule=constant", "run={iterations: 4, checkpoint_every: 1, sample_every: 2}",
    ]  # fmt: skip


def trainer_of(small: list[str], folder: Path, *more: str, recipe: str = "masked") -> Trainer:
    read = load_recipe(recipe, [*small, *more])
    return Session(read, RunFolder.create(folder, dump_recipe(read))).trainer(Silent())


def numbers(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_begins_with_a_ratio_of_one_and_moves(recipe: str, small: list[str], tmp_path: Path) -> None:
    more = ("run.iterations=2", "optimizer.epochs=2", "optimizer.updates=1")
    trainer_of(small, tmp_path / "run", *more, recipe=recipe).train()
    for line in numbers(tmp_path / "run")[:2]:
        assert line["ratio/first_error"] == 0.0
        assert line["grad_norm"] > 0
        assert line["log_ratio_sq"] > 0 or recipe == "wd1"


@pytest.mark.slow
@pytest.mark.parametrize("column", ["token", "step"])
def test_the_gradient_is_that_of_the_recorded_log_probs(column: str, small: list[str], tmp_path: Path) -> None:
    """On-policy, the gradient of the clip is the gradient of -mean(A log p), here by the records of the rollout."""
    trainer = trainer_of(small, tmp_path / "run", f"objective.column={column}", "model.train=full")
    task = trainer.task
    assert isinstance(task, MaskedTask)
    e = trainer.collect(0)[1]
    advantages = torch.linspace(-1.0, 1.0, len(e.rollout.parent))
    objective = trainer.objective
    objective.prepare(e)
    count = torch.tensor(float(objective.rows(e, 0, None)))
    edges = sum(len(t.node) for t in e.rollout.transitions)
    assert count == edges  # a step reveals one of four tokens here
    for batch in objective.batches(e, 0, None):
        objective.backward(e, batch, advantages, None, count)
    found = [p.grad.clone() for p in task.weights.parameters() if p.grad is not None]
    trainer.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for transitions in e.rollout.transitions:
        for row, (state, node) in enumerate(zip(transitions.state.tolist(), transitions.node.tolist())):
            x, after = transitions.x[state : state + 1], transitions.x_next[row : row + 1]
            place = int((x != after).nonzero()[0, 1])
            frame = task.policy.frame(e.prompts[transitions.prompt[state]])
            logits = task.policy.language.logits([frame], x)[0, place].clone()
            logits[task.policy.language.mask] = -torch.inf
            total = total - advantages[node] * logits.log_softmax(-1)[after[0, place]]
    wanted = torch.autograd.grad(total / count, task.weights.parameters(), allow_unused=True)
    for got, want in zip(found, [w for w in wanted if w is not None], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def gradient_of(trainer: Trainer, e: Any, advantages: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of one update."""
    objective = trainer.objective
    objective.prepare(e)
    count = torch.tensor(float(objective.rows(e, 0, None)))
    for batch in objective.batches(e, 0, None):
        objective.backward(e, batch, advantages, None, count)
    found = [p.grad.clone() for p in trainer.task.weights.parameters() if p.grad is not None]
    trainer.optimizer.zero_grad(set_to_none=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_good_completions_have_a_lower_bound_and_bad_ones_an_upper_bound(
    mix: float, small: list[str], tmp_path: Path
) -> None:
    """The gradient is that of both bounds on masks put in by hand; all passes of a completion are in the logarithm."""
    beta, more = 1.7, ("model.train=full", "objective.likelihood.prompt=0.15", "run.iterations=1")
    trainer = trainer_of(small, tmp_path / "run", f"objective.mix={mix}", "objective.beta=1.7", *more, recipe="spg")
    policy = trainer.task.policy

    def some_end_early(text: torch.Tensor) -> bool:
        return 0 < int(text.sum()) < text.numel()

    # Which completions end early depends on the version of torch.
    made = (trainer.collect(iteration)[1] for iteration in range(20))
    e = next(one for one in made if some_end_early(policy.moves.counted(one.rollout.x)))
    advantages = torch.arange(1.0, len(e.rollout.parent) + 1).cos()
    assert 0 < int((advantages[e.rollout.leaf] < 0).sum()) < len(e.rollout.leaf)
    found = gradient_of(trainer, e, advantages)
    text, total = policy.moves.counted(e.rollout.x), torch.zeros(())
    for leaf, (node, ids) in enumerate(zip(e.rollout.leaf.tolist(), e.rollout.x)):
        passes, frames = trainer.objective.remasking.framed(e, leaf, 0)
        logits = policy.language.logits(frames, torch.where(passes.masked, policy.language.mask, ids))
        logits[..., policy.language.mask] = -torch.inf
        p = logits.softmax(-1).gather(2, ids.expand(2, 4)[..., None])[..., 0]
        lower, upper, seen = torch.zeros(()), torch.zeros(()), 0
        for place in text[leaf].nonzero().flatten().tolist():
            inside = [k for k in range(2) if passes.masked[k, place]]
            share = [float((passes.masked[k] & text[leaf]).sum() / text[leaf].sum()) for k in range(2)]
            lower = lower + sum(p[k, place].log() / (2 * share[k]) for k in inside)
            if inside:
                upper = upper + sum(p[k, place] ** beta / (2 * share[k]) for k in inside).log() / beta
                seen += 1
        upper = upper * int(text[leaf].sum()) / seen
        bound = lower if advantages[node] > 0 else mix * upper + (1 - mix) * lower
        total = total - advantages[node] * bound
    wanted = torch.autograd.grad(total / text.sum(), trainer.task.weights.parameters(), allow_unused=True)
    for got, want in zip(found, [w for w in wanted if w is not None], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    plain = "objective={name: estimated, likelihood: {name: blocks, size: 2}, surrogate: reinforce, level: token}"
    below = gradient_of(trainer_of(small, tmp_path / "plain", plain, *more, recipe="spg"), e, advantages)
    alike = [torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(found, below, strict=True)]
    assert all(alike) == (mix == 0.0)


@pytest.mark.slow
def test_passes_that_score_different_tokens_have_equal_bounds(small: list[str], tmp_path: Path) -> None:
    """A token has one pass in likelihood `trace`, so both bounds are its log-prob, if the passes come together."""
    found = []
    for kind in ("name: sandwiched, mix: 1.0", "name: estimated, surrogate: reinforce"):
        words = (f"objective={{{kind}, likelihood: trace}}", "model.train=full")
        trainer = trainer_of(small, tmp_path / kind[6:10], *words, recipe="spg")
        e = trainer.collect(0)[1]
        found.append(gradient_of(trainer, e, torch.arange(1.0, len(e.rollout.parent) + 1).cos()))
    assert max(float(one.abs().max()) for one in found[0]) > 1e-3
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_run_resumes_to_the_bit(small: list[str], tmp_path: Path) -> None:
    more = ("optimizer.ema={decay: 0.5}", KL, "optimizer.updates=3", "optimizer.epochs=2")
    for recipe in ("masked_branch", "uni_grpo", "co_grpo", "spg"):
        whole, broken = tmp_path / recipe / "whole", tmp_path / recipe / "broken"
        trainer_of(small, whole, *more, recipe=recipe).train()
        trainer_of(small, broken, *more, "run.iterations=2", recipe=recipe).train()
        for file in (broken / "lora").iterdir():
            file.unlink()
        (broken / "lora").rmdir()
        again = Session(load_recipe(recipe, [*small, *more]), RunFolder(broken)).trainer(Silent())
        again.resume()
        assert again.next_iteration == 2
        again.train()
        assert numbers(whole) == numbers(broken)
        one, two = (load_file(run / "lora" / "adapter_model.safetensors") for run in (whole, broken))
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert (whole / "samples" / "index.jsonl").read_text() == (broken / "samples" / "index.jsonl").read_text()


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(small: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("1+2=\n47-85=\n9\n30+4=\n")
    words = [
        "train", "coupled_grpo", *small, f"data={{train: {prompts}, heldout: {prompts}}}", KL, "evaluate.prompts=3",
        # A batch holds the same states in one process and in two, and with this eps AdamW amplifies no rounding.
        "rollout.batch=16", "optimizer.eps=1.0e-3", "optimizer.updates=2",
    ]  # fmt: skip
    for count in (1, 2):
        job = {"words": [*words, "--out", str(tmp_path / str(count))], "count": count, "environment": {}}
        ranks.run_all([{**job, "log": str(tmp_path / f"log{count}")}], patience=300)
        printed = [(tmp_path / f"log{count}-{rank}.txt").read_text() for rank in range(count)]
        assert json.loads((tmp_path / f"log{count}.json").read_text()) == [0] * count, "\n".join(printed)
    one, two = tmp_path / "1", tmp_path / "2"
    assert (one / "samples" / "index.jsonl").read_text() == (two / "samples" / "index.jsonl").read_text()
    for mine, theirs in zip(numbers(one), numbers(two), strict=True):
        for name in mine:
            if name != "steps":
                assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_a_run_on_another_device_leaves_no_tensor_behind(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    with simulated_device() as device:
        monkeypatch.setattr(Accelerator, "device", property(lambda self: device.device))
        for recipe in ("masked_branch", "gdpo_masked"):
            more = (KL, "optimizer.updates=2", "run.iterations=2")
            trainer = trainer_of(small, tmp_path / recipe, *more, recipe=recipe)
            trainer.train()
            assert all(p.device == device.device for p in trainer.task.weights.parameters())


@pytest.mark.slow
def test_the_result_and_the_record_of_a_run(small: list[str], tmp_path: Path, command: Any) -> None:
    run = tmp_path / "run"
    trainer_of(small, run, "model.train=full").train()
    plain = AutoModelForMaskedLM.from_pretrained(run / "model")
    ids = torch.tensor([[4, 5, 6, 7]])
    assert not torch.equal(plain(ids).logits, AutoModelForMaskedLM.from_pretrained(small[0][11:])(ids).logits)
    samples = [json.loads(line) for line in (run / "samples" / "index.jsonl").read_text().splitlines()]
    for sample in samples:
        assert len(sample["steps"]) == 4
        assert sample["steps"][-1] == sample["completion"]
    status, out, errors = command("evaluate", str(run), "--trust")
    assert status == 0, errors
    last = numbers(run)[-1]["eval/nines"]
    assert f"nines: {last:.4f}" in out


@pytest.mark.slow
def test_texts_of_an_evaluation_are_written_batch_by_batch(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    run = tmp_path / "run"
    trainer_of(small, run, "run.iterations=1").train()
    add, written = KeptSamples.add, list[int]()

    def counted(self: KeptSamples, rows: Any, experience: Any, numbers: Any) -> None:
        written.append(len(experience.samples))
        add(self, rows, experience, numbers)

    monkeypatch.setattr(KeptSamples, "add", counted)
    for name, batch in (("whole", 8), ("parts", 2)):
        words = ["evaluate", str(run), "--trust", f"rollout.batch={batch}", "--out", str(tmp_path / name)]
        assert command(*words)[0] == 0
    assert written == [5, 2, 2, 1]
    whole, parts = ((tmp_path / name / "index.jsonl").read_text() for name in ("whole", "parts"))
    assert whole == parts


@pytest.mark.slow
def test_samples_depend_on_their_seeds_alone(folder: Path, tmp_path: Path) -> None:
    from flowgrpo.inference.text_inference import sample_texts
    from flowgrpo.training.data import PromptRow

    rows = [PromptRow(0, "1+2="), PromptRow(1, "47-85=")]
    how = ["generation.tokens=4", "sampler.steps=3"]
    found = sample_texts(str(folder), rows, tmp_path / "all", count=4, overrides=how)[1]
    later = sample_texts(str(folder), rows, tmp_path / "later", seed=3, overrides=how)[1]
    assert [found[3], found[7]] == later
    assert len(set(found)) > 2
    greedy = sample_texts(str(folder), rows, tmp_path / "greedy", count=2, temperature=0.0, overrides=how)[1]
    assert greedy[0] == greedy[1]


def test_logits_that_are_no_numbers_are_refused(small: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small, tmp_path / "run")
    with torch.no_grad():
        next(iter(trainer.task.weights.modules.values())).get_input_embeddings().weight[
            masked_tokenizer().mask_token_id
        ] = torch.nan
    with pytest.raises(FloatingPointError, match="the model's logits are no numbers"):
        trainer.iterate(0)


def real_models() -> dict[str, Any]:
    import transformers as t

    size = {"vocab_size": len(masked_tokenizer()), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    size |= {"num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return {
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**size)),
        "roberta": lambda: t.RobertaForMaskedLM(t.RobertaConfig(**size, max_position_embeddings=64)),
        "modernbert": lambda: t.ModernBertForMaskedLM(t.ModernBertConfig(**size, cls_token_id=1, sep_token_id=1)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_classes_of_published_models_load_by_path_and_train(name: str, small: list[str], tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        path = saved(real_models()[name](), tmp_path / "model")
    trainer_of([*small, f"model.path={path}"], tmp_path / "run", "run.iterations=1").train()
    line = numbers(tmp_path / "run")[0]
    assert line["ratio/first_error"] == 0.0
    assert line["grad_norm"] > 0


def test_a_row_depends_on_its_own_prompt_alone(folder: Path) -> None:
    """Prompts of several lengths share a batch: padding and neighbours do not reach a row's logits."""
    language = load_masked_model(str(folder))
    frames = [language.encode(text) for text in ("1+2=", "47-85=", "9")]
    x = torch.tensor([[5, language.mask, 7], [language.mask] * 3, [8, 9, language.mask]])
    together = language.logits(frames, x)
    for k in range(3):
        torch.testing.assert_close(together[k : k + 1], language.logits(frames[k : k + 1], x[k : k + 1]))
    ids = torch.tensor([[*frames[1][0], *x[1].tolist()]])
    torch.testing.assert_close(together[1:2], language.model(input_ids=ids).logits[:, len(frames[1][0]) :])


def test_a_text_ends_at_its_end_token_and_shows_masks(folder: Path) -> None:
    language = load_masked_model(str(folder))
    one, two, end = (language.tokenizer.convert_tokens_to_ids(token) for token in ("1", "2", "<eos>"))
    assert language.decode([one, two, end, one]) == "12"
    assert language.decode([one, language.mask, language.mask, two]) == "1__2"
    assert language.decode([end, one]) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["sampler.steps=5"], "at most 4 steps"),
        (["evaluate.steps=9"], "evaluate.steps is 9"),
        (["sampler.plan={name: ode}"], "all completions of a prompt would be equal"),
        (["sampler.plan.shared_noise=false"], "every sample begins as the same masks"),
        (["sampler.plan={name: spine, splits: [1]}"], "rollout.group: 1"),
        (["sampler.order={name: blocks, size: 0}"], "greater than or equal to 1"),
        (["objective={name: estimated, likelihood: doubled}"], "there is no likelihood 'doubled'"),
        (["objective.surrogate={name: sspo}"], "asks for"),
        (["objective={name: sandwiched, beta: 0.5}"], "objective.beta: Input should be greater than or equal to 1"),
        (["objective={name: sandwiched, mix: 1.5}"], "objective.mix: Input should be less than or equal to 1"),
        (["objective={name: sandwiched, surrogate: clip}"], "sandwiched has no option 'surrogate'"),
        (["credit=prefix"], "reads the tokens of completions"),
        (["task=mask"], "is not a task"),
        (
            ["extensions=[{name: pacing}]", "sampler.order.threshold=0.9"],
            "pacing learns how many .* leave sampler.order.t",
        ),
        (["extensions=[{name: pacing}]", "generation.stop_at_end=true"], "use generation.stop_at_end False"),
        (["sampler.order.threshold=1.0"], "less than 1"),
    ],
)
def test_what_cannot_run_is_refused_with_a_reason(changes: list[str], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        load_recipe("masked", changes)


def test_a_model_that_is_not_masked_and_code_of_a_model_are_refused(
    folder: Path, random_language_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="not a masked language model"):
        load_masked_model(str(random_language_folder))
    config = json.loads((folder / "config.json").read_text())
    copy = tmp_path / "own-code"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "config.json").write_text(
        json.dumps({**config, "model_type": "own", "auto_map": {"AutoModelForMaskedLM": "own.Model"}})
    )
    with pytest.raises(ValueError, match="brings its own code"):
        load_masked_model(str(copy))


def test_prompts_and_completions_fit_the_positions_of_the_model(small: list[str], tmp_path: Path) -> None:
    task = trainer_of(small, tmp_path / "run").task
    assert isinstance(task, MaskedTask)
    policy, language = task.policy, task.policy.language
    tokens, given = policy.recipe.generation.tokens, sum(map(len, language.encode("1+2=")))
    assert language.positions == language.model.config.max_position_embeddings

    def refused(room: int, prompt: str) -> str:
        language.__dict__["positions"] = room
        with pytest.raises(ValueError, match=f"positions for {room} tokens in all") as error:
            policy.frame(prompt)
        return str(error.value)

    language.__dict__["positions"] = given + tokens
    policy.frame("1+2=")
    fits = f"'1+3=' has {given} tokens and generation.tokens is {tokens}"
    assert fits in refused(given + tokens - 1, "1+3=")
    assert f"set generation.tokens (`flowgrpo sample`: --max-tokens) to at most {tokens - 1}" in refused(
        given + tokens - 1, "1+3="
    )
    assert "shorten the prompt" in refused(given, "1+4=")


def test_a_prompt_without_room_in_the_model_is_refused_before_the_run(small: list[str], tmp_path: Path) -> None:
    rows = [*["1+2="] * 40, "+".join(["1"] * 40) + "="]
    (tmp_path / "train.txt").write_text("".join(f"{row}\n" for row in rows))
    with pytest.raises(
        ValueError, match=r"train\.txt: prompt 41: the prompt '1\+1.* tokens in all; shorten the prompt"
    ):
        trainer_of([*small, f"data.train={tmp_path / 'train.txt'}"], tmp_path / "run")


@pytest.mark.slow
def test_rooms_of_published_models_are_what_their_forward_pass_takes() -> None:
    """A model without a table of positions takes longer rows than its configuration names."""
    import transformers as t

    size = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "pad_token_id": 1}
    size |= {"num_attention_heads": 2, "max_position_embeddings": 16}
    ends = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    causal = {key: size[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    relative = {"position_biased_input": False, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    models = {
        t.BertForMaskedLM: (t.BertConfig(**size), 16),
        t.CamembertForMaskedLM: (t.CamembertConfig(**size), 14),
        t.MPNetForMaskedLM: (t.MPNetConfig(**size), 14),
        t.NystromformerForMaskedLM: (t.NystromformerConfig(**size), 16),
        t.RoFormerForMaskedLM: (t.RoFormerConfig(**size), 16),
        t.EsmForMaskedLM: (t.EsmConfig(**size, position_embedding_type="rotary", mask_token_id=4), None),
        t.DebertaV2ForMaskedLM: (t.DebertaV2Config(**size, **relative, position_buckets=4), None),
        t.ModernBertForMaskedLM: (t.ModernBertConfig(**size, **ends), None),
        t.GPT2LMHeadModel: (t.GPT2Config(**causal, n_positions=16), 16),
        t.OPTForCausalLM: (t.OPTConfig(**causal, ffn_dim=16, max_position_embeddings=16), 16),
        t.GPTJForCausalLM: (t.GPTJConfig(**causal, n_positions=16, rotary_dim=4), 16),
        t.LlamaForCausalLM: (t.LlamaConfig(**causal, intermediate_size=16, max_position_embeddings=16), None),
    }
    for kind, (config, room) in models.items():
        model = kind(config).eval()
        assert room_of(model) == room, kind.__name__
        row = torch.full((1, 19), 5)
        fits = row[:, : room or 19]
        with torch.no_grad():
            assert model(input_ids=fits, attention_mask=torch.ones_like(fits)).logits.shape[1] == fits.shape[1]
            if room is not None:
                with pytest.raises((IndexError, RuntimeError)):
                    model(input_ids=row, attention_mask=torch.ones_like(row))


def test_an_evaluation_takes_the_likeliest_tokens_and_counts_them(small: list[str], tmp_path: Path) -> None:
    task = trainer_of(small, tmp_path / "run", "evaluate.steps=2", "evaluate.seeds=2").task
    assert isinstance(task, MaskedTask)
    rows = Session(load_recipe("masked", small)).data.heldout[:3]
    seen: list[int] = []
    found = task.evaluation(rows, [1, 2, 3], Clock(task.device, task.clock_parts), seen.append)
    assert found.samples[0::2] == found.samples[1::2]
    assert found.plan.num_steps == 2
    assert seen[-1] == 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_program_of_the_model_card_runs(kind: str, small: list[str], folder: Path, tmp_path: Path) -> None:
    trainer_of(small, tmp_path / "run", f"model.train={kind}", "run.iterations=1").train()
    result = tmp_path / "run" / ("lora" if kind == "lora" else "model")
    card = (result / "README.md").read_text()
    assert "pipeline_tag: fill-mask" in card
    program = card.partition("```python\n")[2].partition("```")[0]
    exec(compile(program, "card", "exec"), {})
