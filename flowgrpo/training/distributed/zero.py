"""DeepSpeed's ZeRO stage 2 (arXiv 1910.02054): optimizer state and gradients are cut into one part per process.

The model and its calls stay unchanged. DeepSpeed's engine holds a function of the trained weights. The gradient of this
function is the gradient that a loss has already given. The engine adds this gradient over processes, keeps the part of
this process, and later moves this part of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ...configs.schema import AnyRecipe
from ...weights.collective import Lockstep, teller
from ...weights.trained import TrainedWeights
from ..updating import TAKEN, learning_rate, require_finite, settings_of, steps_taken
from .processes import Processes

MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroOptimizer:
    """AdamW whose state is cut into parts, one for each process. Every process has the whole weights.

    Args:
        recipe: has the rates and bounds.
        weights: the trained weights. From now on the processes are in step at `weights.backward`.
        processes: of the run.
        zero: the section `zero_optimization` of DeepSpeed's configuration.
    """

    shared_out = "the optimizer in parts by ZeRO-2"

    def __init__(
        self, recipe: AnyRecipe, weights: TrainedWeights, processes: Processes, zero: Mapping[str, Any]
    ) -> None:
        import deepspeed

        self.recipe, self.weights, self.processes = recipe, weights, processes
        named = weights.named_parameters()
        # Each denoiser has a group: the weights and moments of an expert without a gradient must stay unchanged.
        experts = [list(names) for _, names in groupby(named, key=lambda name: name.partition(".")[0])]
        self._parameters = [[named[name] for name in names] for names in experts]
        self._used = torch.zeros(len(experts), device=self._parameters[0][0].device)
        # DeepSpeed replaces the parameters of each group by one flat parameter, which a fused step was not tried with.
        self._inner = torch.optim.AdamW(
            [{"params": group} for group in self._parameters], **settings_of(recipe), fused=False
        )
        self._inner.register_step_pre_hook(self._leave_unused)
        self._given = _Given([parameter for group in self._parameters for parameter in group])
        self._engine, *_ = deepspeed.initialize(
            model=self._given,
            optimizer=self._inner,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": dict(zero),
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": recipe.optimizer.max_grad_norm,
                # Losses are divided by counts of the whole optimizer step, and processes may have unequal shares of it.
                "gradient_allreduce_op": "sum",
                "managed_gradient_accumulation": False,
                "steps_per_print": float("inf"),
            },
        )
        self._own = [group["params"][0] for group in self._inner.param_groups]
        for own in self._own:
            moments = {name: torch.zeros_like(own, requires_grad=False) for name in MOMENTS}
            self._inner.state[own] = {"step": torch.tensor(0.0), **moments}
        # Otherwise the first step would do this, and a state could not be loaded before it.
        self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        weights.steps = _Rounds(self._add)
        self._taken = 0

    def _leave_unused(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        for own, used in zip(self._own, self._used.tolist()):
            if not used:
                own.grad = None

    def _add(self, parts: Sequence[Tensor]) -> None:
        """Add this process's gradient to the sum over processes. Every process must call it equally often."""
        groups = self._parameters
        gradients: list[Tensor | None] = [None] * sum(len(group) for group in groups)
        if parts:
            gradients = self.weights.gradients(sum(parts[1:], parts[0]))
        first = 0
        for number, group in enumerate(groups):
            if any(gradient is not None for gradient in gradients[first : first + len(group)]):
                self._used[number] = 1.0
            first += len(group)
        self._engine.backward(self._engine(gradients))

    def step(self) -> Tensor:
        """Take one optimizer step; returns the norm of the gradient before clipping. Every process must call it.

        Raises:
            FloatingPointError: the gradient is not finite; the weights have not moved.
        """
        self._used = self.processes.add(self._used)
        if not self._used.any():
            self._taken += 1
            return torch.zeros(())
        for group in self._inner.param_groups:
            group["lr"] = learning_rate(self.recipe, self._taken)
        self._engine.step()
        self._taken += 1
        self.weights.write()
        self._used = torch.zeros_like(self._used)
        norm = torch.as_tensor(self._engine.get_global_grad_norm()).detach().cpu()
        # If the gradient is not finite, DeepSpeed leaves the step out and returns -1 or infinity.
        require_finite(torch.where(norm < 0, torch.inf, norm))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, because a step leaves no gradients."""

    def state_dict(self) -> dict[str, Any]:
        """The state of AdamW on whole weights, in the order of `weights.parameters`. Every process must call it.

        Only the state of the first process has the tensors, on the CPU.
        """
        from deepspeed.utils import safe_get_full_optimizer_state

        state: dict[int, dict[str, Tensor]] = {}
        number = 0
        for own, group in zip(self._own, self._parameters):
            step = self._inner.state[own]["step"]
            for parameter in group:
                if step:
                    found = {name: safe_get_full_optimizer_state(parameter, name) for name in MOMENTS}
                    kept = {name: value.cpu() for name, value in found.items()} if self.processes.rank == 0 else {}
                    state[number] = {"step": step.clone(), **kept}
                number += 1
        shared = {key: value for key, value in self._inner.param_groups[0].items() if key != "params"}
        groups = [{**shared, "params": list(range(number))}]
        return {"state": state, "param_groups": groups, TAKEN: self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Load the weights first."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        self._taken = steps_taken(state)
        number = 0
        for own, group in zip(self._own, self._parameters):
            for parameter in group:
                safe_set_full_fp32_param(parameter, parameter.detach())
                if (entry := state["state"].get(number)) is not None:
                    self._inner.state[own]["step"] = entry["step"].clone()
                    for name in MOMENTS:
                        safe_set_full_optimizer_state(parameter, entry[name].to(parameter.device), name)
                number += 1


class _Rounds(Lockstep):
    """Keeps backward passes in step. Each process has the whole model, so evaluations need not be in step."""

    def __init__(self, add: Callable[[Sequence[Tensor]], None]) -> None:
        super().__init__([], teller())
        self._add = add

    def _backward(self, parts: list[Tensor]) -> None:
        self._add(parts)


class _Given(nn.Module):
    """The module of the engine: its value is 0, and the gradients of its parameters are given.

    The engine adds gradients over processes in the order in which they come. All processes have the same graph, so the
    engine adds gradients of the same parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(parameters)

    def forward(self, gradients: list[Tensor | None]) -> Tensor:
        return _GivenGradients.apply(gradients, *self.parts)


class _GivenGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients, ctx.parameters = gradients, parameters
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        pairs, ctx.gradients = list(zip(ctx.gradients, ctx.parameters)), []
        # Every parameter gets a gradient, so the buckets of all processes have the same size.
        return None, *(torch.zeros_like(p) if gradient is None else gradient for gradient, p in pairs)
