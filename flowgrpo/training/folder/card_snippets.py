"""The program in a model card that loads a result and makes a sample, with plain diffusers, transformers and peft."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...configs.schema import AnyRecipe, MaskedRecipe, Recipe, TextRecipe
from ...pipelines.arguments import TEXT

if TYPE_CHECKING:
    from .model_card import CardFacts

RESULT_LINE = re.compile(r'^RESULT = ".*"  # this (?:folder|repository)\b.*$', re.MULTILINE)
BASE_LINE = re.compile(r'^BASE = "(.*)"  # the folder of the base model\r?$', re.MULTILINE)
SECOND = "pytorch_lora_weights_transformer_2.safetensors"
FIRST = "pytorch_lora_weights.safetensors"
EMBEDDED = {
    "scenes": "embedded_pipeline()",
    "arithmetic": 'language_folder("arithmetic")',
    "arithmetic:masked": 'masked_folder("arithmetic:masked")',
}
"""Embedded models -> the call that gives their folder."""
UNTRAINED = "arithmetic:untrained"


def snippet(recipe: AnyRecipe, facts: CardFacts, base: str, published: bool) -> str:
    """A fence of Python, and notes. On this machine, the program runs from any folder.

    Args:
        recipe: of the run.
        facts: about the result.
        base: name of the base model; of a folder, the last part of its path.
        published: whether the base model's name is a name on the hub.
    """
    imports, named = _named(recipe, base, published) if facts.kind == "lora" else ([], [])
    if isinstance(recipe, Recipe):
        lines = _of_images(recipe, facts)
    else:
        lines = _of_text(recipe, facts) if isinstance(recipe, TextRecipe) else _of_masks(recipe, facts)
    start = ["import torch", *_imports(recipe, facts), *imports, "", result_line(facts.place), *named]
    notes = []
    if isinstance(recipe, Recipe) and (recipe.sampler.shift is not None or recipe.sampler.sigmas is not None):
        notes.append("The run had noise levels of its own, and the program has those of the pipeline.")
    if isinstance(recipe, Recipe):
        notes += [
            f"The run had a `{name}`, which is not part of this card; write it into the program."
            for name in facts.call
            if _is_withheld(facts.call, name)
        ]
    if isinstance(recipe, MaskedRecipe):
        notes.append(f"`flowgrpo sample` unmasks a whole completion, here in {recipe.sampler.steps} steps.")
    if not isinstance(recipe, Recipe) and recipe.model.system is not None:
        where = "" if isinstance(recipe, MaskedRecipe) else "; write it into the program"
        notes.append(f"The run had a system message, which is not part of this card{where}.")
    if facts.kind == "lora" and recipe.model.path == UNTRAINED:
        notes.append("The run drew the weights of the base model from its seed, and the program does not.")
    return "\n".join(["```python", *start, *lines, "```", *(f"\n{note}" for note in notes)])


def result_line(place: str) -> str:
    """The line that names the folder of a result."""
    return f"RESULT = {quoted(place)}  # this folder; elsewhere, its path or the name of its repository"


def repository_line(name: str) -> str:
    """The same line of a card that lies in a repository."""
    return f"RESULT = {quoted(name)}  # this repository, or the path of a folder with its files"


def unknown_base_line(name: str) -> str:
    """The line that names the base model, where its folder is not known."""
    return f"BASE = {quoted(name)}  # the base model; write the path of its folder, or its name on the hub"


def _named(recipe: AnyRecipe, base: str, published: bool) -> tuple[list[str], list[str]]:
    """The lines that import and name the base model."""
    call = EMBEDDED.get(base) or EMBEDDED.get(base.partition(":")[0])
    if published:
        return [], [f"BASE = {quoted(base)}"]
    if call is None:
        with suppress(OSError):
            if Path(recipe.model.path).is_dir():
                return [], [f"BASE = {quoted(str(Path(recipe.model.path).resolve()))}  # the folder of the base model"]
        return [], [unknown_base_line(base)]
    return [f"from flowgrpo.training.model_paths import {call.partition('(')[0]}"], [f"BASE = {call}"]


def quoted(text: str) -> str:
    """A text as Python writes it."""
    return json.dumps(text, ensure_ascii=False)


def _imports(recipe: AnyRecipe, facts: CardFacts) -> list[str]:
    if not isinstance(recipe, Recipe):
        adapter = ["from peft import PeftModel"] if facts.kind == "lora" else []
        if facts.own_class:
            return [*adapter, "from flowgrpo.text.masked_model import load_masked_model"]
        reads = "AutoProcessor" if _sees(recipe) else "AutoTokenizer"
        pictures = ["from PIL import Image"] if _sees(recipe) else []
        return [*adapter, *pictures, f"from transformers import {_class(recipe)}, {reads}"]
    video = ["from diffusers.utils import export_to_video"] if facts.video else []
    pictures = ["from diffusers.utils import load_image"] if facts.pictures else []
    sound = ["import wave"] if facts.sampling_rate is not None else []
    return [*sound, f"from diffusers import {recipe.model.pipeline or 'DiffusionPipeline'}", *video, *pictures]


def _of_images(recipe: Recipe, facts: CardFacts) -> list[str]:
    # This imports diffusers, and the card of a language model is written without it.
    from ...weights.precision import dtype_argument

    source = "BASE" if facts.kind == "lora" else "RESULT"
    absent = "".join(f", {name}=None" for name in facts.left_out)
    call = f"{source}, {dtype_argument()}=torch.{recipe.model.dtype}{absent}"
    lines = [
        f"pipe = {recipe.model.pipeline or 'DiffusionPipeline'}.from_pretrained({call})",
        *(_loads(facts) if facts.kind == "lora" else []),
    ]
    steps = recipe.evaluate.steps or recipe.sampler.rollout_steps
    given = {"num_inference_steps": steps, **_shown(facts.call)}
    lines += [
        "sample = pipe(",
        '    prompt="a prompt",',  # by name: the calls of some classes begin with `image`
        *(f'    {name}=load_image("{"picture" if name == "image" else name}.png"),' for name in facts.pictures),
        *(_argument(name, value, _is_withheld(facts.call, name)) for name, value in given.items()),
        *(['    output_type="np",'] if facts.sampling_rate is not None else []),
        f").{'audios' if facts.sampling_rate is not None else 'frames' if facts.video else 'images'}[0]",
    ]
    if facts.sampling_rate is not None:
        return [
            *lines,
            'with wave.open("sample.wav", "wb") as file:',
            f'    file.setparams((len(sample), 2, {facts.sampling_rate}, 0, "NONE", ""))',
            '    file.writeframes((sample.T.clip(-1, 1) * 32767).astype("<i2").tobytes())',
        ]
    lines.append('export_to_video(sample, "sample.mp4")' if facts.video else 'sample.save("sample.png")')
    return lines


def _loads(facts: CardFacts) -> list[str]:
    """How the adapter is loaded: by the pipeline, by the denoiser, or each of two experts by its own file."""
    if not facts.loads_lora:
        return [f'pipe.transformer.load_lora_adapter(RESULT, weight_name="{FIRST}", prefix=None)']
    if SECOND not in facts.files:
        # Without a network, diffusers finds no name on the hub, and in older versions not even in a folder.
        return [f'pipe.load_lora_weights(RESULT, weight_name="{FIRST}")']
    return [
        f'pipe.load_lora_weights(RESULT, weight_name="{FIRST}")',
        f'pipe.load_lora_weights(RESULT, weight_name="{SECOND}", load_into_transformer_2=True)',
    ]


def _argument(name: str, value: Any, withheld: bool) -> str:
    remark = f"  # the run had another {name}" if withheld else ""
    return f"    {name}={quoted(value) if isinstance(value, str) else repr(value)},{remark}"


def _shown(call: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and flags of the call. Texts and pictures are the user's own.

    An empty text stands in the place of a negative prompt, because some classes have no guidance without one.
    """
    given = {name: "" if _is_withheld(call, name) else value for name, value in call.items()}
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, bool | int | float)
        or (_is_negative(name) and isinstance(value, str) and not value.strip())
    }


def _is_withheld(call: Mapping[str, Any], name: str) -> bool:
    """Whether an argument is a negative prompt with words, which are the user's own."""
    return _is_negative(name) and isinstance(call.get(name), str) and bool(call[name].strip())


def _is_negative(name: str) -> bool:
    return TEXT.fullmatch(name) is not None and name.startswith("negative")


def _sees(recipe: AnyRecipe) -> bool:
    return isinstance(recipe, TextRecipe) and recipe.model.pictures


def _class(recipe: TextRecipe | MaskedRecipe) -> str:
    if _sees(recipe):
        return "AutoModelForImageTextToText"
    return "AutoModelForCausalLM" if isinstance(recipe, TextRecipe) else "AutoModelForMaskedLM"


def _of_words(recipe: TextRecipe | MaskedRecipe, facts: CardFacts) -> list[str]:
    """The lines that load a language model and its tokenizer, or its processor."""
    dtype = f"dtype=torch.{recipe.model.dtype}"
    reads = ("processor", "AutoProcessor") if _sees(recipe) else ("tokenizer", "AutoTokenizer")
    lines = [f"{reads[0]} = {reads[1]}.from_pretrained(RESULT)"]
    if facts.kind == "lora":
        lines.append(f"base = {_class(recipe)}.from_pretrained(BASE, {dtype})")
        return [*lines, "model = PeftModel.from_pretrained(base, RESULT)"]
    return [*lines, f"model = {_class(recipe)}.from_pretrained(RESULT, {dtype})"]


def _of_masks(recipe: MaskedRecipe, facts: CardFacts) -> list[str]:
    count = recipe.generation.tokens
    if facts.own_class:
        source, chat = "BASE" if facts.kind == "lora" else "RESULT", recipe.model.chat
        options = f"dtype=torch.{recipe.model.dtype}" + ("" if chat is None else f", chat={chat}")
        options += "" if recipe.model.block is None else f", block={recipe.model.block}"
        at_once = "all masks" if recipe.model.block is None else "the first block"
        return [
            f"language = load_masked_model({source}, {options})",
            *(["PeftModel.from_pretrained(language.model, RESULT)"] if facts.kind == "lora" else []),
            f"masks = torch.full((1, {count}), language.mask)",
            'logits = language.logits([language.encode("a prompt")], masks)',
            f"print(language.decode(logits[0].argmax(-1).tolist()))  # {at_once} in one step",
        ]
    return [
        *_of_words(recipe, facts),
        f'inputs = tokenizer("a prompt" + {count} * tokenizer.mask_token, return_tensors="pt")',
        'logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits',
        'found = torch.where(inputs["input_ids"] == tokenizer.mask_token_id, logits.argmax(-1), inputs["input_ids"])',
        "print(tokenizer.decode(found[0], skip_special_tokens=True))  # all masks in one step",
    ]


def _system(recipe: TextRecipe) -> str:
    """The place of the run's system message, whose words are the user's own."""
    return "" if recipe.model.system is None else '{"role": "system", "content": "the system message of the run"}, '


def _of_pictures(recipe: TextRecipe, facts: CardFacts) -> list[str]:
    options = f", **{recipe.model.chat_template_kwargs!r}" if recipe.model.chat_template_kwargs else ""
    longest, texts = recipe.generation.max_tokens, recipe.generation.stop
    stop = f", stop_strings={texts!r}, tokenizer=processor.tokenizer" if texts else ""
    return [
        *_of_words(recipe, facts),
        'content = [{"type": "image"}, {"type": "text", "text": "a prompt"}]',
        f'messages = [{_system(recipe)}{{"role": "user", "content": content}}]',
        f"text = processor.apply_chat_template(messages, add_generation_prompt=True{options})",
        'picture = Image.open("picture.png").convert("RGB")',
        'options = {"add_special_tokens": False, "return_tensors": "pt"}',
        "inputs = processor(text=[text], images=[[picture]], **options).to(model.dtype)",
        f"output = model.generate(**inputs, max_new_tokens={longest}, do_sample=False{stop})",
        'answer = output[0, inputs["input_ids"].shape[1] :]',
        "print(processor.tokenizer.decode(answer, skip_special_tokens=True))",
    ]


def _of_text(recipe: TextRecipe, facts: CardFacts) -> list[str]:
    if _sees(recipe):
        return _of_pictures(recipe, facts)
    lines = _of_words(recipe, facts)
    if facts.chat:
        lines.append(f'messages = [{_system(recipe)}{{"role": "user", "content": "a prompt"}}]')
        lines.append('options = {"tokenize": False, "add_generation_prompt": True}')
        if recipe.model.chat_template_kwargs:
            lines.append(f"options |= {recipe.model.chat_template_kwargs!r}")
        lines.append("text = tokenizer.apply_chat_template(messages, **options)")
        lines.append('inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")')
    else:
        lines.append('inputs = tokenizer("a prompt", return_tensors="pt")')
    # Some tokenizers also give token types, which `generate` refuses for most models.
    longest, texts = recipe.generation.max_tokens, recipe.generation.stop
    stop = f", stop_strings={texts!r}, tokenizer=tokenizer" if texts else ""
    return [
        *lines,
        'ids, mask = inputs["input_ids"], inputs["attention_mask"]',
        f"output = model.generate(ids, attention_mask=mask, max_new_tokens={longest}, do_sample=False{stop})",
        "print(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))",
    ]
