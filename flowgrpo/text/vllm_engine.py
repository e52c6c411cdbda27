"""vLLM as a sampler in the process of the trainer: it has a copy of the model, which follows the trained weights.

Written against vLLM 0.33 (`LLM.generate`, `LLM.collective_rpc`, `LLM.reset_prefix_cache`, `SamplingParams`,
`TokensPrompt`, and the worker's `reload_weights`, which takes weights under the names of a checkpoint).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .model import LanguageModel, merged_weights
from .sampling import Sampled

SHARE = 0.3
"""Of the accelerator's memory for vLLM, where the recipe names none: the trainer needs the rest."""
OURS = ("model", "logprobs_mode", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Arguments of `LLM` that a recipe cannot set: the weights go to one worker in this process."""


class VllmEngine:
    """Samples as `sampling.sample_completions` does, with vLLM.

    Each completion is a request of its own with its own seed, so it does not depend on the others but for rounding;
    their common prompt is encoded once by vLLM's prefix cache. The streams of numbers are vLLM's: other completions
    than those of transformers.

    Args:
        language: the model that is trained.
        dtype: of vLLM's copy.
        seed: of vLLM itself; what is sampled has seeds of its own.
        longest: tokens of a prompt and its completion.
        options: further arguments of vLLM's `LLM`.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: an option that follows from the recipe.
    """

    def __init__(
        self, language: LanguageModel, *, dtype: str, seed: int, longest: int, options: Mapping[str, Any]
    ) -> None:
        for name in OURS:
            if name in options:
                raise ValueError(f"generation.engine_options has {name}, which is not for recipes to set; leave it out")
        # The weights are handed over as they are, which only works within one process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            import vllm
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            raise ImportError("generation.engine vllm needs vLLM, which is not installed: pip install vllm") from None
        self._vllm = vllm
        reach = getattr(language.model.config, "max_position_embeddings", None)
        settings: dict[str, Any] = {
            "dtype": dtype,
            "seed": seed,
            "max_model_len": longest if reach is None else min(longest, reach),
            "gpu_memory_utilization": SHARE,
            **options,
        }
        # Log-probs of what was drawn from: temperature and filters included.
        self._llm = vllm.LLM(model=language.model.name_or_path, logprobs_mode="processed_logprobs", **settings)

    def __call__(
        self,
        language: LanguageModel,
        prompts: Sequence[Sequence[int]],
        owner: Sequence[int],
        keys: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Sampled:
        """Complete prompts with the weights that the model has now; arguments as `sample_completions`."""
        self.synchronise(language.model)
        ends = language.ends
        filters = {name: value for name, value in (("top_k", top_k), ("top_p", top_p)) if value is not None}
        requests = [self._vllm.TokensPrompt(prompt_token_ids=list(prompts[p])) for p in owner]
        settings = [
            self._vllm.SamplingParams(
                seed=key, temperature=temperature, max_tokens=max_tokens, stop_token_ids=list(ends), logprobs=0,
                detokenize=False, **filters,
            )
            for key in keys
        ]  # fmt: skip
        ids: list[list[int]] = []
        log_probs: list[list[float]] = []
        for request in self._llm.generate(requests, settings, use_tqdm=False):
            [found] = request.outputs
            if found.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended a completion by {found.finish_reason!r}")
            drawn = [int(token) for token in found.token_ids]
            chances = [step[token].logprob for token, step in zip(drawn, found.logprobs, strict=True)]
            ids.append(drawn)
            log_probs.append(chances if temperature > 0 else [0.0] * len(drawn))
        return Sampled(ids, log_probs, [drawn[-1] in ends for drawn in ids])

    @torch.no_grad()
    def synchronise(self, model: nn.Module) -> None:
        """Give vLLM's copy the weights of a model, and have it forget the prompts it encoded with other ones."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": merged_weights(model)})
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not let go of prompts that it encoded with other weights")
