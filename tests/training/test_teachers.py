"""Frozen teachers: whose predictions they are, which prompt has which, and the loss on the policy's own states."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.training.checking import check
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.recipe_findings import Checked
from flowgrpo.training.session import Session, start
from flowgrpo.training.trainer import Trainer
from tests.parts.own_parts import same_when_resumed

SMALL = (
    "rollout={prompts: 2, group: 2, batch: 4}", "sampler.steps=4", "rewards=[{name: jpeg_compressibility}]",
    "data.heldout=null", "evaluate.rewards=null",
)  # fmt: skip
NOISY = "sampler.plan={name: window, shared_noise: true, window: {name: frozen, size: 2, start: 1}}"


@pytest.fixture(scope="module")
def lora(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA far from zero that plain diffusers has written, of another rank and on other layers than a run's own."""
    folder = tmp_path_factory.mktemp("teacher")
    pipe = StableDiffusion3Pipeline.from_pretrained(random_pipeline, text_encoder_3=None, tokenizer_3=None)
    module = pipe.transformer
    targets = ["attn.to_q", "attn.to_v", "ff.net.2"]
    module.add_adapter(LoraConfig(r=3, lora_alpha=6.0, target_modules=targets), adapter_name="mine")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for key, parameter in module.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    module.save_lora_adapter(folder, adapter_name="mine", weight_name="pytorch_lora_weights.safetensors")
    return folder


def words_of(model: Path, *more: str) -> list[str]:
    return [f"model.path={model}", *SMALL, *more]


def trainer_of(model: Path, folder: Path, *more: str, name: str = "diffusion_opd") -> Trainer:
    return Session(load_recipe(name, words_of(model, *more)), RunFolder.create(folder, "")).trainer(Silent())


def taught_by(path: Path | None, **call: Any) -> str:
    given = json.dumps({**({} if path is None else {"lora": str(path)}), "call": call})
    return f"model.teachers=[{given}]"


def predictions(trainer: Trainer, count: int = 2) -> torch.Tensor:
    """The velocities of some states under the weights of now."""
    policy = trainer.task.policy
    policy.bind(trainer.task.plan_for(0))
    x = torch.randn(count, *policy.denoiser.probe.latent_shape, generator=torch.Generator().manual_seed(1))
    found: torch.Tensor = policy.velocity_of(("a red circle", "a blue square"))(x, 1, range(count))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_teacher_is_the_model_with_its_lora_to_the_last_bit(dtype, random_pipeline, lora, tmp_path) -> None:
    """The run that begins from this LoRA predicts the same. The trained LoRA is as without a teacher."""
    kind = f"model.dtype={dtype}"
    trainer = trainer_of(random_pipeline, tmp_path / "a", taught_by(lora), kind)
    begun = trainer_of(random_pipeline, tmp_path / "b", f"model.lora={{start: '{lora}'}}", kind, "model.teachers=[{}]")
    alone = trainer_of(random_pipeline, tmp_path / "c", kind)
    weights = trainer.task.weights
    assert {n: v.tolist() for n, v in weights.state_dict().items()} == {
        n: v.tolist() for n, v in alone.task.weights.state_dict().items()
    }
    with torch.no_grad():
        for one in (trainer, alone):
            for parameter in one.task.weights.parameters():
                parameter.add_(0.05)
            one.task.weights.write()
        own = predictions(trainer)
        assert torch.equal(own, predictions(alone))
        with trainer.task.policy.as_teacher("teacher"):
            taught = predictions(trainer)
        assert torch.equal(taught, predictions(begun))
        assert torch.equal(own, predictions(trainer))
        with weights.reference():
            base = predictions(trainer)
    assert not torch.equal(taught, own)
    assert not torch.equal(taught, base)
    assert all(parameter.requires_grad for parameter in weights._computing().values())


@pytest.mark.parametrize(("plan", "noisy"), [(NOISY, True), ("sampler.steps=4", False)])
def test_the_loss_is_the_kl_of_steps_or_half_the_squared_distance(plan, noisy, random_pipeline, lora, tmp_path) -> None:
    trainer = trainer_of(random_pipeline, tmp_path / "run", plan, taught_by(lora, guidance_scale=2.0))
    _, e = trainer.collect(0)
    policy, total, count = trainer.task.policy, 0.0, 0
    for t in e.rollout.transitions:
        policy.bind(e.plan)
        velocity = policy.velocity_of(e.prompts)
        with torch.no_grad():
            own = velocity(t.x, t.step, t.prompt)
            with policy.as_teacher("teacher"):
                taught = velocity(t.x, t.step, t.prompt)
        c = t.coefficients
        means = [(1 - c.sigma_next) * (t.x - c.sigma * v) + c.kappa * (t.x + (1 - c.sigma) * v) for v in (own, taught)]
        assert (c.std > 0) == noisy
        apart = (means[0] - means[1]).double().square().flatten(1).mean(1) / (2 * (c.std or 1.0) ** 2)
        total += float(apart[t.state].sum())
        count += len(t.state)
    record = trainer.update(e, torch.zeros(len(e.rollout.parent)))
    assert count == 2 * 2 * (2 if noisy else 3)
    assert record["taught"] == record["loss"] == pytest.approx(total / count, rel=1e-4)
    assert record["ratio/first_error"] == 0.0
    assert total > 0


def test_rewards_have_no_part_in_the_loss(random_pipeline, lora, tmp_path) -> None:
    found = []
    for k in range(2):
        trainer = trainer_of(random_pipeline, tmp_path / f"{k}", taught_by(lora))
        _, e = trainer.collect(0)
        trainer.update(e, torch.full((len(e.rollout.parent),), 3.0 * k))
        found.append(trainer.task.weights.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def two(folder: Path, lora: Path) -> list[str]:
    """Two teachers, and prompts that name them."""
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": f"a {color} circle", "teacher": name} for color, name in (("red", "near"), ("blue", "far"))]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    far = json.dumps({"name": "far", "lora": str(lora)})
    return [f"data.train={prompts}", f"model.teachers=[{{name: near}}, {far}]"]


def test_of_several_teachers_each_prompt_has_its_own(random_pipeline, lora, tmp_path) -> None:
    """Before training, the first teacher is the policy itself, so only prompts of the second give a loss."""
    trainer = trainer_of(random_pipeline, tmp_path / "run", *two(tmp_path, lora), NOISY)
    rows, e = trainer.collect(0)
    assert e.teachers == tuple(row.columns["teacher"] for row in rows)
    assert set(e.teachers) == {"near", "far"}
    seen = 0
    for transitions, batch in trainer.objective.batches(e, 0, None):
        apart = trainer.task.policy.score(e, transitions, batch).to_teacher().abs().flatten(1).amax(1)
        names = [e.teachers[transitions.prompt[k]] for k in transitions.state[transitions.edges_of(batch)].tolist()]
        assert [bool(value > 1e-4) for value in apart] == [name == "far" for name in names]
        seen += len(names)
    assert seen == 8


@pytest.mark.parametrize("plan", [NOISY, "sampler.steps=4"])
def test_the_policy_comes_nearer_to_its_teacher(plan, random_pipeline, lora, tmp_path) -> None:
    """The result holds the trained LoRA alone, and the teacher is as it was."""
    words = [plan, taught_by(lora), "run.iterations=20", "optimizer.learning_rate=0.01"]
    trainer = start(load_recipe("diffusion_opd", words_of(random_pipeline, *words)), tmp_path / "run").trainer(Silent())
    with torch.no_grad(), trainer.task.policy.as_teacher("teacher"):
        before = predictions(trainer)
    trainer.train()
    with torch.no_grad(), trainer.task.policy.as_teacher("teacher"):
        assert torch.equal(predictions(trainer), before)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line["taught"] for line in lines if "taught" in line]
    assert len(found) == 20
    assert sum(found[-4:]) < 0.5 * sum(found[:4])
    written = load_file(tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors")
    assert len(written) == len(trainer.task.weights.state_dict())


def test_a_run_with_teachers_resumes_to_the_last_bit(random_pipeline, lora, tmp_path) -> None:
    words = words_of(random_pipeline, *two(tmp_path, lora), "run.iterations=2", "run.checkpoint_every=1")
    same_when_resumed("diffusion_opd", [*words, "optimizer.updates=2"], tmp_path)


def test_a_teacher_stands_beside_a_reward(random_pipeline, lora, tmp_path) -> None:
    words = (taught_by(lora), "penalties=[{name: taught, weight: 0.1}, {name: kl, weight: 0.1}]", NOISY)
    trainer = trainer_of(random_pipeline, tmp_path / "run", *words, name="flow_grpo")
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["taught"] > record["kl"]


def test_steps_without_teachers_say_what_a_penalty_lacks(random_pipeline, tmp_path) -> None:
    words = (NOISY, "penalties=[{name: kl, weight: 0.1}]", "model.teachers=[]")
    trainer = trainer_of(random_pipeline, tmp_path / "run", *words)
    _, e = trainer.collect(0)
    scored = trainer.task.policy.score(e, *next(trainer.objective.batches(e, 0, None)))
    with pytest.raises(ValueError, match=r"the recipe has no model\.teachers; write @needs"):
        scored.to_teacher()


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("diffusion_opd", ["model.teachers=[]"], r"penalty taught compares with teachers, and model\.teachers is left"),
        ("diffusion_opd", ["penalties=[]"], "objective visited has no loss but the penalties, .*add penalty taught"),
        ("diffusion_opd", ["sampler.plan.window=null"], "objective visited trains steps, .* set sampler.plan.window"),
        ("diffusion_opd", ["model.teachers=[{}, {}]"], "2 teachers, and number 0 has no name; give each a name"),
        ("diffusion_opd", ["model.teachers=[{name: a}, {name: a}]"], "two teachers are called a; give one of them"),
        ("diffusion_opd", ["model={train: full, teachers: [{lora: a}]}"], r"teachers\.0\.lora is a, .*train: lora"),
        ("diffusion_opd", ["model.teachers=[{lora: a, path: b}]"], "lora a and path b are two models.*leave one"),
        ("diffusion_opd", ["penalties.llds.weight=0.1", "optimizer.updates=2"], "objective visited has no ratio"),
        ("flow_grpo", ["model.teachers=[{}]"], r"nothing here compares with model\.teachers; add penalty taught"),
        ("diffusion_nft", ["model.teachers=[{}]", "penalties.taught.weight=1"], "compares the steps of a rollout"),
        ("neighbor_grpo", ["objective=transition"], "no stochastic step"),
    ],
)
def test_a_recipe_that_cannot_be_taught_is_refused(name: str, words: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe(name, words)


def checked(*words: str) -> Checked:
    return check(load_recipe("diffusion_opd", list(words)))


def test_the_check_looks_at_the_files_of_teachers_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "b.bin").write_bytes(b"")
    teachers = json.dumps([{"name": "a", "lora": f"{tmp_path}/no"}, {"name": "b", "lora": f"{tmp_path}/b.bin"}])
    first, second, third = checked(f"model.teachers={teachers}").texts("fault", "needed")
    assert first == f"{tmp_path}/no does not exist; name a .safetensors file or a folder that holds a LoRA"
    assert second.startswith(f"{tmp_path}/b.bin is not a .safetensors file")
    assert third.endswith("has no column `teacher`, and model.teachers has several; write one of a, b there")
    [fault] = checked("model.teachers=[{call: {guidance_scal: 2}}]").texts("fault")
    assert "guidance_scal" in fault


def test_a_prompt_must_name_a_teacher_that_there_is(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a red circle", "teacher": "a"}\n{"prompt": "a blue circle", "teacher": "c"}\n')
    words = (f"data.train={prompts}", "model.teachers=[{name: a}, {name: b}]", "rollout.prompts=2")
    [fault] = checked(*words).texts("fault")
    assert "line 2" in fault
    assert "has teacher 'c', and model.teachers has several; write one of a, b there" in fault


def test_a_lora_of_another_model_is_refused(random_pipeline, tmp_path) -> None:
    file = tmp_path / "pytorch_lora_weights.safetensors"
    shapes = {"other.to_q.lora_A.weight": (2, 6), "other.to_q.lora_B.weight": (5, 2)}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, file)
    with pytest.raises(ValueError, match=r"has no layer other\.to_q; use a LoRA of this model"):
        trainer_of(random_pipeline, tmp_path / "run", taught_by(file))


@pytest.mark.slow
def test_a_prompt_may_have_one_image(random_pipeline: Path, tmp_path: Path) -> None:
    """No image is compared with another, so one is enough. Rewards that are compared need two."""
    more = ("rollout={prompts: 2, group: 1, batch: 2}", "sampler.steps=4", taught_by(None, guidance_scale=3.0))
    trainer = trainer_of(random_pipeline, tmp_path / "run", *more)
    record = trainer.iterate(0)
    assert record["taught"] > 0
    assert record["grad_norm"] > 0
    with pytest.raises(ValueError, match="a group of one has no baseline"):
        trainer_of(random_pipeline, tmp_path / "other", "rollout={prompts: 2, group: 1, batch: 2}", name="mixgrpo")
