"""A causal language model of transformers with its tokenizer, and its trained weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from ..weights.adapters import ADAPTER
from ..weights.lora import EVERY_LAYER, LoraSpec, is_linear, is_transposed
from ..weights.merging import merged_weight, refuse_shared
from ..weights.pipeline_folders import from_hub
from ..weights.quantized import Quantized, is_packed
from ..weights.quantized import quantize as put_in_fewer_bits
from ..weights.saving import ADAPTER_FILE, PEFT_PREFIX, put_adapter, save_adapter
from ..weights.trained import TrainedWeights
from .chat_templates import answer_end, conversation, template_ids, uses_template, without_template
from .key_value_cache import cache_of, has_states, select_rows
from .model_folder import check_language_folder, check_sight_of, load_processor, load_whole
from .picture_marks import MARK, without_marks
from .pictured import PicturedIds, Shown, pictured_ids
from .positions import room_of
from .prompt_batch import PromptBatch
from .recomputing import recompute

if TYPE_CHECKING:
    from .masked_model import MaskedLanguageModel

_COMPONENT = "model"


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model.

    Attributes:
        model: a model of transformers, with `logits` in its output and a key-value cache.
        tokenizer: the tokenizer of the model.
        system: a system message, for chat templates.
        chat: whether prompts go through the chat template.
        chat_template_kwargs: values for further variables of the chat template.
        processor: of a model that is shown pictures; None for a model that reads text alone.
    """

    model: Any
    tokenizer: Any
    system: str | None = None
    chat: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    processor: Any = None

    @cached_property
    def positions(self) -> int | None:
        """The largest number of tokens that the model takes, see `room_of`."""
        return room_of(self.model)

    @cached_property
    def keeps_states(self) -> bool:
        """Whether a layer keeps a state of the past, as recurrent layers and convolutions do, see `has_states`.

        Raises:
            ValueError: the model gives no cache, or a cache from which rows cannot be chosen.
        """
        device = next(self.model.parameters()).device
        with torch.no_grad():
            cache = cache_of(self.model(input_ids=torch.tensor([[self.pad]], device=device), use_cache=True))
        select_rows(cache, torch.tensor([0, 0], device=device))
        return has_states(cache)

    @property
    def components(self) -> dict[str, nn.Module]:
        """The parts that can be trained."""
        return {_COMPONENT: self.model}

    @property
    def pad(self) -> int:
        """Token for padding, which is always masked out.

        It is the end token if the tokenizer has no token for padding, or one that the model has no embedding of.
        """
        found, table = self.tokenizer.pad_token_id, self.model.get_input_embeddings()
        known = found is not None and found < getattr(table, "num_embeddings", math.inf)
        return int(found) if known else self.ends[0]

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a completion.

        Raises:
            ValueError: if neither the model's generation settings nor its tokenizer name such a token.
        """
        config = getattr(self.model, "generation_config", None)
        listed = getattr(config, "eos_token_id", None)
        found = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
        if self.tokenizer.eos_token_id is not None:
            found.append(self.tokenizer.eos_token_id)
        if not found:
            raise ValueError("the tokenizer has no eos_token, so completions never end; give it one and save it")
        return tuple(dict.fromkeys(int(token) for token in found))

    @cached_property
    def answer_end(self) -> int:
        """The token that ends an answer; of several end tokens, the one of the chat template or of the tokenizer."""
        return answer_end(self.tokenizer, self.chat, self.ends)

    @cached_property
    def unsaid(self) -> tuple[int, ...]:
        """Tokens that stand for pictures, sounds and films, and that a completion never has; none without a processor.

        For such a token a model would look for a picture.
        """
        # A plan counts tokens without a model.
        if self.processor is None or self.model is None:
            return ()
        # Older versions of transformers have other names for some models.
        names = [f"{what}_token_{name}" for what in ("image", "video", "audio") for name in ("id", "index")]
        found = [getattr(self.model.config, name, None) for name in names]
        # Ovis 2 has several tokens around a picture.
        found += getattr(self.model.config, "visual_indicator_token_ids", None) or []
        return tuple(dict.fromkeys(int(token) for token in found if isinstance(token, int)))

    def said(self, logits: Tensor) -> Tensor:
        """Logits [..., V] in which a token of `unsaid` has no chance; they are changed in place."""
        for token in self.unsaid:
            logits[..., token] = -torch.inf
        return logits

    def words(self, text: str) -> str:
        """A text that is put into a prompt or a completion: nothing in it stands for a picture, see `without_marks`."""
        return text if self.processor is None else without_marks(text, self._signs)

    def answer_tokens(self, text: str) -> list[int]:
        """The token ids of a whole completion that the model did not write: its words and an end token."""
        return [*self.tokenizer.encode(self.words(text), add_special_tokens=False), self.answer_end]

    @cached_property
    def _signs(self) -> list[str]:
        """The texts of the tokens of `unsaid`."""
        return [str(self.tokenizer.convert_ids_to_tokens(token)) for token in self.unsaid]

    def encode(
        self,
        prompt: str,
        messages: Sequence[Mapping[str, str]] | None = None,
        pictures: Shown | Sequence[Shown] | None = None,
    ) -> list[int]:
        """Token ids of a prompt, or of a conversation so far, see `template_ids`; with pictures, see `pictured_ids`.

        Raises:
            ValueError: a prompt with pictures has the text of a token that stands for one.
        """
        if pictures is not None and self.processor is not None:
            shown = pictures if isinstance(pictures, Sequence) else [pictures]
            talk = conversation(prompt, messages, self.system)
            signs = [sign for sign in self._signs if sign != MARK and any(sign in one["content"] for one in talk)]
            if signs:
                raise ValueError(f"a prompt has {signs[0]} in its words; write {MARK} for the place of a picture")
            return pictured_ids(self.processor, self.model, talk, shown, self.chat_template_kwargs)
        if self.chat:
            return template_ids(self.tokenizer, prompt, messages, self.system, self.chat_template_kwargs)
        plain: list[int] = self.tokenizer(without_template(prompt, messages)).input_ids
        return plain

    def batch(self, prompts: Sequence[Sequence[int]]) -> PromptBatch:
        """Prompts in one batch on the device of the model.

        Raises:
            ValueError: a prompt has tokens of a picture, and the picture is lost.
        """
        for token in self.unsaid:
            if any(token in row for row in prompts if not isinstance(row, PicturedIds)):
                raise ValueError(
                    "a prompt has tokens of pictures without its pictures; encode it with `pictures`, and put ids "
                    "after it with flowgrpo.text.pictured.followed"
                )
        return PromptBatch(prompts, self.pad, next(self.model.parameters()).device, self.model.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def load_language_model(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    chat: bool | None = None,
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    pictures: bool = False,
    quantize: Quantized | None = None,
) -> LanguageModel:
    """Load a folder or hub id of transformers, in evaluation mode, because dropout makes log-probs irreproducible.

    Args:
        path: a folder or hub id, as `from_pretrained` takes it.
        dtype: dtype of the weights.
        attention: transformers' `attn_implementation`.
        chat: whether to use the chat template; None uses it if there is one.
        system: a system message; needs a chat template.
        chat_template_kwargs: values for further variables of the chat template, such as `enable_thinking`.
        pictures: whether prompts show pictures to the model.
        quantize: fewer bits for the linear layers that a LoRA adapts by default, see `quantized.quantize`. With `nf4`
            the model must then be moved to its device.

    Raises:
        ValueError: if a file of the folder is missing or damaged, weights are missing, the model needs code of its own,
            a chat template is needed and there is none, or it does not read one of the variables.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    if Path(path).is_dir():
        check_language_folder(Path(path), pictures=pictures)
    options = {} if attention is None else {"attn_implementation": attention}
    kind, processor = AutoModelForImageTextToText if pictures else AutoModelForCausalLM, None
    # Every supported version takes this name; newer versions prefer `dtype`.
    with from_hub(path):
        if not Path(path).is_dir():
            check_sight_of(path, pictures)
        model = load_whole(kind, path, dtype=dtype, **options)
        if pictures:
            processor = load_processor(path)
            tokenizer = processor.tokenizer
        else:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if quantize is not None:
        put_in_fewer_bits(model, quantize, linear_layers(model))
    values = dict(chat_template_kwargs or {})
    chats = uses_template(tokenizer, path, chat, system, values)
    return LanguageModel(model, tokenizer, system, chats, values, processor)


def reinitialise(language: LanguageModel, seed: int) -> None:
    """Draw all weights of a model anew, as its class does for a new model; the global generator is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        fresh = type(language.model)(language.model.config)
    language.model.load_state_dict(fresh.state_dict())


class LanguageWeights(TrainedWeights):
    """The trained part of a language model; made by `LanguageWeights.adapter` or `LanguageWeights.whole`."""

    @classmethod
    def adapter(cls, language: LanguageModel | MaskedLanguageModel, spec: LoraSpec, *, seed: int) -> LanguageWeights:
        """Freeze the model, and add a LoRA adapter to every linear layer but the output layer.

        Raises:
            ValueError: as in `TrainedWeights.lora`.
        """
        if spec.targets in (None, EVERY_LAYER):
            spec = replace(spec, targets=linear_layers(language.model))
        return cls.lora(language, spec, seed=seed, modules=language.components)

    @classmethod
    def whole(cls, language: LanguageModel | MaskedLanguageModel, *, keep_reference: bool = False) -> LanguageWeights:
        """Train every weight."""
        return cls.full(language, keep_reference=keep_reference, modules=language.components)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write an adapter or a model, in the format of peft and transformers, and the tokenizer.

        `PeftModel.from_pretrained(base, folder)` loads an adapter, and `AutoModelForCausalLM.from_pretrained(folder)`
        loads a model.

        Raises:
            ValueError: if the folder exists and `overwrite` is off.
        """
        super().save(folder, overwrite=overwrite)

    def _write(self, folder: Path) -> None:
        if self.kind == "lora":
            save_adapter(self.pipe.model, ADAPTER, folder)
        else:
            self.pipe.model.save_pretrained(folder)
        # A processor writes the files of its tokenizer too.
        (getattr(self.pipe, "processor", None) or self.pipe.tokenizer).save_pretrained(folder)

    def load_lora(self, folder: str | Path) -> None:
        """Load the adapter that `save` wrote, exact to the last bit."""
        with self.exact():
            put_adapter(self.pipe.model, ADAPTER, Path(folder) / ADAPTER_FILE, PEFT_PREFIX)

    def gradient_checkpointing(self, on: bool) -> None:
        """Recompute activations in the backward pass instead of keeping them; raises as `recompute`."""
        recompute(self.pipe.model, on)


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name in a checkpoint, with all active adapters added to the weight.

    The model is not changed, and only one sum at a time is in memory.

    Args:
        model: a model of transformers, with or without LoRA.

    Raises:
        ValueError: as in `refuse_shared`.
    """
    refuse_shared(model)
    for name, parameter in model.named_parameters():
        owner, adapted, rest = name.partition(".base_layer.")
        if ".lora_" in name:
            continue
        weight = parameter.detach()
        if not adapted:
            yield name, weight
            continue
        yield f"{owner}.{rest}", merged_weight(model.get_submodule(owner)) if rest == "weight" else weight


def note_on_experts(model: nn.Module) -> str | None:
    """A sentence about weights that no LoRA is on, because a layer holds many matrices; None if they are few.

    Args:
        model: a model of transformers with a LoRA.
    """
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if ".lora_" not in name}
    stacked = [name for name, parameter in model.named_parameters() if parameter.dim() == 3 and name in sizes]
    share = sum(sizes[name] for name in stacked) / sum(sizes.values())
    if share < STACKED:
        return None
    return (
        f"the LoRA is on linear layers, and {share:.0%} of the weights are in layers of several experts, such as "
        f"{stacked[0]}: these stay as they are. With model.train: full they are trained"
    )


STACKED = 0.1
"""Share of the weights from which on it is worth a note that no LoRA is on them."""


FUSED = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Types of models with a kernel that reads the weights of `out_proj` itself; peft puts no adapter there."""


def linear_layers(model: Any) -> tuple[str, ...]:
    """Full names of the linear layers that a LoRA on text adapts: all but the output layer.

    A model that also reads images or sounds has layers for them, such as a vision tower. These layers have no adapter,
    also where prompts show pictures. Some other layers have none either: layers whose weights are read from
    outside, layers that give more than a product, such as routers of experts, and layers of a mixture of experts whose
    adapters peft would put on all experts.

    Raises:
        ValueError: there are none.
    """
    head, several = model.get_output_embeddings(), model.config.get_text_config() is not model.config
    reached = set((_decoder_of(model) if several else model).modules())
    passed = _read_from_outside(model)
    found = tuple(
        name
        for name, part in model.named_modules()
        if is_linear(part) and _is_a_product(part) and part is not head and part in reached and part not in passed
    )
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear layers for a LoRA; write model.train: full")
    return _not_moved(model, found)


def _decoder_of(model: Any) -> nn.Module:
    """The part of a model through which text passes. Older versions of transformers give more for some models."""
    found = model.get_decoder() or model.base_model
    inner = next((getattr(found, name) for name in ("text_model", "language_model") if hasattr(found, name)), found)
    return inner  # type: ignore[no-any-return]


def _is_a_product(layer: Any) -> bool:
    """Whether a layer gives a tensor of its size: a router of experts may give scores and choices."""
    if type(layer).forward is nn.Linear.forward or is_transposed(layer) or is_packed(layer):
        return True
    with torch.no_grad():
        found = layer(layer.weight.new_zeros(1, layer.in_features))
    return isinstance(found, Tensor) and found.shape == (1, layer.out_features)


def _read_from_outside(model: nn.Module) -> set[nn.Module]:
    """Linear layers of recurrent mixers that are not called, because the scan takes their weights."""
    found: set[nn.Module] = set()
    for part in model.modules():
        if hasattr(part, "A_log") and hasattr(part, "dt_proj"):
            found.add(part.dt_proj)
        if hasattr(part, "A_log") and hasattr(part, "out_proj") and model.config.model_type in FUSED:  # type: ignore[union-attr]
            found.add(part.out_proj)
    return found


def _not_moved(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names without those that peft takes for the names of experts, as they were before experts were stacked."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # older versions of peft move nothing
        return names
    config = LoraConfig(target_modules=list(names))
    convert_peft_config_for_transformers(config, model, None)
    return tuple(name for name in names if name in config.target_modules)
