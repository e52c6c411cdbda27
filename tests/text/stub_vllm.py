"""A stand-in for vLLM: the part of its interface that is used, with the names, arguments and defaults of vLLM 0.33.

It has a model of its own, read from the folder it is given, and draws as transformers' sampler does, so that runs with
it can be compared. `LLM.shift` falsifies the log-probs that it reports, as another engine's rounding would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor

from flowgrpo.text.model import LanguageModel, load_language_model
from flowgrpo.text.sampling import sample_completions


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


@dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True
    stop: list[str] = field(default_factory=list)
    include_stop_str_in_output: bool = False


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)


class LLM:
    made: ClassVar[list[LLM]] = []
    shift: ClassVar[Callable[[int, int], float]] = staticmethod(lambda request, place: 0.0)

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        seed: int = 0,
        gpu_memory_utilization: float = 0.92,
        enforce_eager: bool = False,
        **kwargs: Any,
    ) -> None:
        assert set(kwargs) <= {"max_model_len", "logprobs_mode"}, "arguments of EngineArgs that the stand-in knows"
        assert kwargs["logprobs_mode"] == "processed_logprobs"
        self.settings = {
            "dtype": dtype, "seed": seed, "gpu_memory_utilization": gpu_memory_utilization,
            "enforce_eager": enforce_eager, **kwargs,
        }  # fmt: skip
        self.language: LanguageModel = load_language_model(model, dtype=getattr(torch, dtype))
        self.reloads = 0
        self.stale = False
        self.made.append(self)

    def generate(
        self, prompts: Sequence[TokensPrompt], sampling_params: Sequence[SamplingParams], *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        assert not self.stale, "prompts that were encoded with other weights would be used again"
        assert not use_tqdm, "a bar of progress would be drawn over the run's own"
        first = sampling_params[0]
        for asked in sampling_params:
            assert asked.n == 1
            assert asked.seed is not None
            assert asked.logprobs == 0
            assert asked.detokenize == bool(asked.stop) == asked.include_stop_str_in_output
            assert asked.stop_token_ids == list(self.language.ends)
        found = sample_completions(
            self.language, [prompt["prompt_token_ids"] for prompt in prompts], range(len(prompts)),
            [asked.seed or 0 for asked in sampling_params], max_tokens=first.max_tokens or 0,
            temperature=first.temperature, top_k=first.top_k or None, top_p=first.top_p,
            min_p=first.min_p or None, stop=first.stop,
        )  # fmt: skip
        outputs = []
        for k, (prompt, ids, chances, ended) in enumerate(
            zip(prompts, found.ids, found.log_probs, found.ended, strict=True)
        ):
            told = [{token: Logprob(p + self.shift(k, t))} for t, (token, p) in enumerate(zip(ids, chances))]
            reason = "stop" if ended else "length"
            outputs.append(RequestOutput(prompt["prompt_token_ids"], [CompletionOutput(0, "", ids, 0.0, told, reason)]))
        return outputs

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> list[Any]:
        assert method == "reload_weights"
        self._reload_weights(*args, **(kwargs or {}))
        return [None]

    @torch.no_grad()
    def _reload_weights(self, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.language.model.named_parameters())
        given = dict(weights_iterator)
        assert given.keys() == own.keys(), "the names of a checkpoint, all of them"
        for name, weight in given.items():
            assert not weight.requires_grad
            assert weight.shape == own[name].shape
            own[name].copy_(weight)
        self.reloads += 1
        self.stale = True

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.stale = False
        return True
