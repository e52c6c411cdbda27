"""The default LoRA adapts every attention of every denoiser."""

import re

import peft
import pytest
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.weights.lora import LoraSpec, target_layers
from flowgrpo.weights.trained import trainable_modules
from tests.tiny_pipelines import require

# Named apart from the usual names.
UNUSUAL = (
    "Flux2KleinPipeline", "HiDreamImagePipeline", "Kandinsky5T2IPipeline", "Kandinsky6TI2VAPipeline",
    "Cosmos3OmniPipeline",
)  # fmt: skip
IN_ATTENTION = re.compile(r"(^|[._])(attn|attention)\d?\.\w+(\.\d+)?$")
# What attention has beside its projections.
GATE = re.compile(r"\.to_gate(_logits|_compress)?$")


def left_out(name: str) -> list[str]:
    """Linear layers of attention without an adapter, of the denoisers that take one."""
    require(name)
    found = []
    for key, module in trainable_modules(TINY[name].fresh()).items():
        if not hasattr(module, "add_adapter"):
            continue
        adapted = set(target_layers(key, module, LoraSpec()))
        linear = [path for path, part in module.named_modules() if isinstance(part, nn.Linear)]
        found += [path for path in linear if IN_ATTENTION.search(path) and path not in adapted]
    return [path for path in found if not GATE.search(path)]


@pytest.mark.slow
@pytest.mark.parametrize("name", UNUSUAL)
def test_every_attention_is_adapted(name: str) -> None:
    assert left_out(name) == []


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_every_attention_of_every_class_is_adapted(name: str) -> None:
    assert left_out(name) == []


@pytest.mark.slow
def test_both_kinds_of_blocks_of_flux_2_are_adapted() -> None:
    (module,) = trainable_modules(TINY["Flux2KleinPipeline"].fresh()).values()
    adapted = target_layers("transformer", module, LoraSpec())
    assert "single_transformer_blocks.0.attn.to_qkv_mlp_proj" in adapted
    assert "single_transformer_blocks.0.attn.to_out" in adapted
    assert "transformer_blocks.0.attn.to_out.0" in adapted
    assert not [name for name in adapted if ".ff" in name or "norm" in name]


@pytest.mark.slow
def test_all_linear_layers_are_adapted_by_the_name_that_peft_has_for_them() -> None:
    (module,) = trainable_modules(TINY["Flux2KleinPipeline"].fresh()).values()
    adapted = target_layers("transformer", module, LoraSpec(targets=("all-linear",)))
    assert adapted == [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    assert set(target_layers("transformer", module, LoraSpec())) < set(adapted)
    module.add_adapter(peft.LoraConfig(r=2, target_modules="all-linear"))
    by_peft = [name for name, part in module.named_modules() if isinstance(part, BaseTunerLayer)]
    assert sorted(by_peft) == sorted(adapted)
