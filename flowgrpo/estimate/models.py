"""Sizes and costs of a recipe's pipeline, found on `meta` without weights; docs/estimates.md explains the method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..configs.image_recipe import ModelConfig, TeacherConfig
from ..configs.sections import LoraConfig
from ..pipelines.architectures import Architecture, appended_tokens, architecture_of, built, latent_shape
from ..pipelines.families import FAMILIES, Family, GuidedCalls
from ..training.images.image_teachers import source_of
from ..training.lora_start import base_of
from ..training.model_paths import DTYPES, call_arguments, model_folder
from ..training.session import lora_spec
from ..weights.adapter_files import StartAdapter
from ..weights.blocks import repeated_blocks
from ..weights.quantized import Quantized, saved_bytes
from ..weights.trained import TrainedWeights
from .footprint import Decoding, Footprint, decoding, footprint

ROWS = 2
"""Number of rows in the evaluation that is counted."""


@dataclass(frozen=True)
class Model:
    """Sizes and costs of a recipe's pipeline.

    Attributes:
        denoiser, vae, encoders: bytes of their weights and buffers.
        trained: number of trained parameters.
        rounded: number of trained parameters that the denoiser has in half precision.
        block: parameters in the largest block; FSDP2 shards a denoiser block by block.
        outside: parameters of a denoiser that are in no block.
        elements: elements of a state: of a latent, and of its sound.
        state_bytes: bytes of one element of a state.
        prediction_bytes: bytes of one element of a stored prediction.
        prompt_bytes: bytes of a prompt's embeddings.
        branches: evaluations of the denoiser for one state.
        reference_branches: the same of the reference, whose call may have other arguments.
        teacher_branches: the same of a teacher, on average over the teachers; 0 if there are none. An evaluation of a
            whole teacher counts by its FLOPs, as so many of the denoiser.
        teachers: bytes of the weights of whole teachers.
        teacher_working: the most memory in use while a teacher's denoiser evaluates a state, in bytes.
        rows: how many of these evaluations are in one call.
        evaluation: cost of one evaluation.
        decode_flops, decode_bytes: cost of decoding one latent.
        decode_graph_flops: FLOPs of decoding one latent and of the gradient with respect to the latent; 0 unless the
            recipe differentiates rewards.
        decode_graph: bytes of the graph of that gradient.
        image_encoders: bytes of the weights of image encoders.
        others: bytes of the weights of further networks.
        decoded_alone: whether latents are decoded one by one, whatever the batch.
    """

    denoiser: int
    vae: int
    encoders: int
    trained: int
    rounded: int
    block: int
    outside: int
    elements: int
    state_bytes: int
    prediction_bytes: int
    prompt_bytes: int
    branches: int
    reference_branches: int
    rows: int
    evaluation: Footprint
    decode_flops: float
    decode_bytes: int
    image_encoders: int = 0
    others: int = 0
    decoded_alone: bool = False
    decode_graph_flops: float = 0.0
    decode_graph: int = 0
    teacher_branches: float = 0.0
    teachers: int = 0
    teacher_working: int = 0


def model_of(
    config: ModelConfig, shown: bool = False, others: Sequence[Mapping[str, Any]] = (), differentiates: bool = False
) -> Model:
    """Sizes and costs of a recipe's pipeline, from its configurations.

    Args:
        config: section `model` of the recipe.
        shown: whether each prompt has a picture of its own.
        others: what other calls change, see `Recipe.other_calls`.
        differentiates: whether the loss differentiates rewards, and so the decoder.

    Raises:
        ValueError: as in `architecture_of`.
    """
    path = model_folder(config.path)
    architecture, call = architecture_of(path, config.pipeline), call_arguments(path, config.call)
    family = FAMILIES[architecture.denoiser[0]]
    dtype = DTYPES[config.dtype]
    latent = latent_shape(architecture, call)
    modes = architecture.one_evaluation, architecture.guider
    evaluations = family.evaluations(call, *modes)

    def with_changes(changes: Mapping[str, Any]) -> GuidedCalls:
        return family.evaluations({**call, **changes}, *modes)

    # The embeddings of a call that encodes prompts in another way are kept beside the others.
    texts = sum({_encoding(family, {**call, **changes}, modes): with_changes(changes).texts
                 for changes in ({}, *others)}.values())  # fmt: skip
    beside = _beside(family, architecture, call, shown)
    adapter = config.lora.model_dump_json() if config.train == "lora" else None
    tokens = family.tokens(call) + int(architecture.inputs.get("read_tokens", 0))

    def denoiser_with(beside: tuple[tuple[str, int], ...]) -> _Denoiser:
        return _denoiser(path, config.pipeline, config.dtype, adapter, latent, tokens, beside, config.quantize)

    denoiser = denoiser_with(beside)
    vae, decoder = _decoder(path, config.dtype, latent, differentiates)
    calls = [with_changes(teacher.call) for teacher in config.teachers]
    wholes = {source: _whole(config, path, source, latent, tokens, beside) for source in _paths(config) if source}
    teachers = [None if source is None else wholes[source] for source in _paths(config)]
    # A teacher that sees pictures reads them beside the state, also where the model sees none.
    seeing = _beside(family, architecture, call, True)
    own = [denoiser if teacher.image is None else denoiser_with(seeing) for teacher in config.teachers]
    costs = [(mine if one is None else one).evaluation for one, mine in zip(teachers, own)]
    return Model(
        denoiser=architecture.experts * denoiser.bytes,
        vae=vae,
        encoders=sum(architecture.encoders.values()) * dtype.itemsize,
        image_encoders=sum(architecture.image_encoders.values()) * dtype.itemsize,
        trained=architecture.experts * denoiser.trained,
        rounded=architecture.experts * denoiser.rounded,
        block=denoiser.block,
        outside=denoiser.outside,
        others=sum(architecture.others.values()) * dtype.itemsize,
        elements=math.prod(latent) + denoiser.beside,
        state_bytes=4 if family.float32 else dtype.itemsize,
        prediction_bytes=4 if evaluations.wide else dtype.itemsize,
        prompt_bytes=texts * denoiser.prompt * dtype.itemsize,
        branches=evaluations.number,
        reference_branches=with_changes(config.reference_call).number,
        teacher_branches=sum(call.number * cost.forward for call, cost in zip(calls, costs))
        / (max(len(calls), 1) * denoiser.evaluation.forward),
        teachers=architecture.experts * sum(one.bytes for one in wholes.values()),
        teacher_working=max((call.rows * cost.working for call, cost in zip(calls, costs)), default=0),
        rows=evaluations.rows,
        evaluation=denoiser.evaluation,
        decode_flops=decoder.flops,
        decode_bytes=decoder.working,
        decode_graph_flops=decoder.graph_flops,
        decode_graph=decoder.graph,
        decoded_alone=family.decoded_alone,
    )


def _beside(
    family: Family, architecture: Architecture, call: Mapping[str, Any], shown: bool
) -> tuple[tuple[str, int], ...]:
    """What the denoiser reads beside a state, with a picture for each prompt or without."""
    return tuple((family.beside(call, architecture.inputs) | appended_tokens(architecture, call, shown)).items())


_OF_SIZE = ("height", "width", "num_frames", "frame_rate", "fps")


def _encoding(family: Family, call: Mapping[str, Any], modes: tuple[bool, int | None]) -> str:
    """What distinguishes calls that encode prompts in different ways: not sizes, nor how strong guidance is."""
    scales = {scale.name for group in (family.guidance, *family.further) for scale in group} | {"guidance_scale"}
    other = {name: call[name] for name in sorted(call) if name not in scales and name not in _OF_SIZE}
    return repr((family.evaluations(call, *modes), other))


def teacher_source(teacher: TeacherConfig, model: ModelConfig) -> StartAdapter | str | None:
    """Where the weights of a teacher are; of a teacher that is not on this machine, its path."""
    try:
        return source_of(teacher, "model.teachers", base_of(model, fetches=False))
    except ValueError:
        return teacher.path


def _paths(config: ModelConfig) -> list[str | None]:
    """The pipelines of the teachers; None for a teacher that has the denoiser of the run."""
    found = [teacher_source(teacher, config) for teacher in config.teachers]
    return [source if isinstance(source, str) else None for source in found]


def _whole(
    config: ModelConfig,
    path: str,
    teacher: str,
    latent: tuple[int, ...],
    tokens: int,
    beside: tuple[tuple[str, int], ...],
) -> _Denoiser:
    """The denoiser of a whole teacher, never quantised; as large as the run's own if its shapes are not known."""
    rest = config.pipeline, config.dtype, None, latent, tokens, beside, None
    try:
        fits = (
            architecture_of(teacher, config.pipeline).denoiser[0] == architecture_of(path, config.pipeline).denoiser[0]
        )
    except ValueError:
        fits = False
    return _denoiser(teacher if fits else path, *rest)


_TEXTS = "encoder_hidden_states", "encoder_hidden_states_2", "pooled_projections", "text_embeds", "cap_feats"
"""Inputs of denoisers that are embeddings of a prompt."""


@dataclass(frozen=True)
class _Denoiser:
    """Sizes of a denoiser: bytes, numbers of parameters, elements of a prompt's embeddings and of what is beside the
    latent in a state; cost of an evaluation.
    """

    bytes: int
    trained: int
    rounded: int
    block: int
    outside: int
    prompt: int
    beside: int
    evaluation: Footprint


@cache
def _denoiser(
    path: str,
    pipeline: str | None,
    dtype_name: str,
    adapter: str | None,
    latent: tuple[int, ...],
    tokens: int,
    beside: tuple[tuple[str, int], ...],
    quantized: Quantized | None,
) -> _Denoiser:
    """The denoiser of a pipeline on `meta`, trained with a LoRA (`adapter`, as JSON) or, without one, in full."""
    architecture = architecture_of(path, pipeline)
    name, config = architecture.denoiser
    dtype = DTYPES[dtype_name]
    module = built(name, config, dtype)
    saved = 0 if quantized is None else saved_bytes(module, quantized)
    size, modules = _bytes(module) - saved, {"transformer": module}
    pipe: Any = SimpleNamespace(components=modules)

    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    settings: Any = {**module.config, **architecture.inputs, **dict(beside)}  # type: ignore[dict-item]
    with torch.device("meta"):
        if adapter:
            spec = lora_spec(LoraConfig.model_validate_json(adapter))
            weights = TrainedWeights.lora(pipe, spec, seed=0, modules=modules)
        else:
            weights = TrainedWeights.full(pipe, modules=modules)
        family = FAMILIES[name]
        inputs = tree_map_only(Tensor, cast, family.inputs(settings, latent, tokens, ROWS))
        evaluation = footprint(module, inputs, ROWS, alike=family.alike)
    blocks = [_numbers(block) for block in repeated_blocks(module)]
    given = inputs | inputs.get("added_cond_kwargs", {})
    texts = [given[key] for key in _TEXTS if key in given]
    kept = architecture.inputs.get("kept_width")
    return _Denoiser(
        bytes=size,
        trained=sum(parameter.numel() for parameter in weights.parameters()),
        rounded=sum(p.numel() for p in module.parameters() if p.requires_grad and p.dtype != torch.float32),
        block=max(blocks, default=0),
        outside=_numbers(module) - sum(blocks),
        prompt=tokens * kept if kept else sum(text[0].numel() for text in texts),
        beside=given["audio_hidden_states"][0].numel() if "audio_hidden_states" in given else 0,
        evaluation=evaluation,
    )


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@cache
def _decoder(path: str, dtype_name: str, latent: tuple[int, ...], graph: bool) -> tuple[int, Decoding]:
    """Bytes of a VAE's weights, and the cost of decoding one latent."""
    vae = built(*architecture_of(path).vae, DTYPES[dtype_name])
    return _bytes(vae), decoding(vae, torch.empty(1, *latent, dtype=DTYPES[dtype_name], device="meta"), graph)


def _bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
