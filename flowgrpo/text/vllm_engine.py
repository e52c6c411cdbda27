"""vLLM as a sampler in the process of the trainer, with its own copy of the model that follows the trained weights.

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
from .sampling import Sampled, Temperature

SHARE = 0.3
"""Share of the accelerator's memory for vLLM if the recipe gives none. The trainer needs the rest."""
OURS = ("model", "logprobs_mode", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Arguments of `LLM` that a recipe cannot set: the weights go to one worker in this process."""


class VllmEngine:
    """A sampler like `sampling.sample_completions` that uses vLLM.

    Each completion is a request with its own seed. So up to rounding, it does not depend on the other completions.
    vLLM's prefix cache encodes a common prompt once. The random numbers are vLLM's own, so the completions differ from
    the completions with transformers.

    Args:
        language: the model that is trained.
        dtype: dtype of vLLM's copy.
        seed: seed of vLLM itself; every sample has its own seed.
        longest: largest number of tokens of a prompt together with its completion.
        options: further arguments of vLLM's `LLM`.

    Raises:
        ImportError: if vLLM is not installed.
        ValueError: if `options` has an option that a recipe cannot set.
    """

    def __init__(
        self, language: LanguageModel, *, dtype: str, seed: int, longest: int, options: Mapping[str, Any]
    ) -> None:
        for name in OURS:
            if name in options:
                raise ValueError(f"generation.engine_options has {name}, which a recipe cannot set; leave it out")
        # The weights are passed as tensors, which only works within one process.
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
        # Log-probs under the distribution of the draws, with temperature and filters.
        self._llm = vllm.LLM(model=language.model.name_or_path, logprobs_mode="processed_logprobs", **settings)

    def __call__(
        self,
        language: LanguageModel,
        prompts: Sequence[Sequence[int]],
        owner: Sequence[int],
        keys: Sequence[int],
        *,
        max_tokens: int,
        temperature: Temperature = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        stop: Sequence[str] = (),
    ) -> Sampled:
        """Complete prompts with the current weights of the model; with the arguments of `sample_completions`.

        Raises:
            ValueError: the temperature is a function.
        """
        if callable(temperature):
            raise ValueError("vLLM samples a completion at one temperature; use generation.engine transformers")
        self.synchronise(language.model)
        ends = language.ends
        given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        filters = {name: value for name, value in given.items() if value is not None}
        # vLLM reads texts that end a completion only if it decodes tokens.
        texts = {"stop": list(stop), "include_stop_str_in_output": True} if stop else {}
        requests = [self._vllm.TokensPrompt(prompt_token_ids=list(prompts[p])) for p in owner]
        settings = [
            self._vllm.SamplingParams(
                seed=key, temperature=temperature, max_tokens=max_tokens, stop_token_ids=list(ends), logprobs=0,
                detokenize=bool(stop), **texts, **filters,
            )
            for key in keys
        ]  # fmt: skip
        ids: list[list[int]] = []
        log_probs: list[list[float]] = []
        ended: list[bool] = []
        for request in self._llm.generate(requests, settings, use_tqdm=False):
            [found] = request.outputs
            if found.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended a completion by {found.finish_reason!r}")
            drawn = [int(token) for token in found.token_ids]
            chances = [step[token].logprob for token, step in zip(drawn, found.logprobs, strict=True)]
            ids.append(drawn)
            ended.append(drawn[-1] in ends or (bool(stop) and found.finish_reason == "stop"))
            log_probs.append(chances if temperature > 0 else [0.0] * len(drawn))
        return Sampled(ids, log_probs, ended)

    @torch.no_grad()
    def synchronise(self, model: nn.Module) -> None:
        """Give vLLM's copy the weights of a model, and clear the cache of prompts encoded with other weights."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": merged_weights(model)})
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not clear its cache of prompts, which were encoded with other weights")
