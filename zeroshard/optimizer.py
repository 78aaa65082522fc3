"""The facade: `zeroshard.AdamW`, a `torch.optim.Optimizer` in every respect. No mechanism."""

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .accounts import is_updated_by_torch, memory_of, summary_of
from .config import Options, Precision
from .engine import Engine, engines_of
from .errors import ConfigError, GradientError
from .join import UnevenInputs, share_options
from .param_groups import (
    check_group,
    describe_groups,
    describe_others,
    frozen_parameters,
    in_forward_order,
    not_trained_yet,
    other_tensors,
)
from .state import ShownState, check_groups, consolidate, has_master, load_slot, slices_of
from .state_shard import StateShard
from .transport import connect, device_of
from .wrappers import DDPGuard, unwrap

__all__ = ["AdamW"]


class AdamW(torch.optim.Optimizer, UnevenInputs):
    """AdamW with optimizer state, gradients and parameters sharded over the data-parallel ranks.

    Put it in the place of ``torch.optim.AdamW``; the model is not wrapped. After ``backward()``
    every ``p.grad`` is a `ShardTensor`: this rank's slice of the gradient averaged over all ranks.

    Args:
        params: all that torch's AdamW takes, or a module, which gives its own parameters.
        lr: learning rate, a float or a tensor.
        betas: coefficients of the running averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        amsgrad: must be False.
        maximize: ascend instead of descend.
        foreach: accepted and ignored, as are `fused` and `capturable`: they choose torch's
            implementations.
        capturable: see `foreach`.
        differentiable: must be False.
        fused: see `foreach`.
        stage: 1 (optimizer state sharded; full gradients and communication buffers live until
            backward ends, the buffers longer), 2 (a gradient is freed once it is reduced) or 3
            (a parameter is whole only around the forward and the backward of its unit).
        model: the module, where `params` is not one: for stage 3, for names, and for its buffers.
        mesh: a DeviceMesh (1-D: shard; 2-D: replicate x shard), a process group, or None for the
            default group.
        precision: see `Precision`.
        bucket_mb: target size of a communication bucket in MiB.
        max_grad_norm: clip the global gradient norm to this inside `step`. Where the update reads
            gradients through the coefficient, `p.grad` itself stays as backward left it.
        reduction: "mean" over the ranks, or "sum" for losses that are normalised over all ranks.
        sync_init: take parameters and, where the module is known, buffers from the first rank.
        skip_nonfinite: skip a step on every rank when any gradient holds an Inf or a NaN; counted
            in `skipped_steps` and logged.
        reshard_after_forward: stage 3: free a unit between its forward and its backward.
        units: stage 3: module classes, class names or names of modules that are gathered together.
            None: elements of ModuleLists, embeddings and the output head; see docs/stage3.md.

    Raises:
        ConfigError: wrong arguments, or ranks that differ; on every rank, before anything changes.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2; Rajbhandari et al. 2020,
    arXiv:1910.02054, sections 5.1 to 5.3.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        stage: int = 2,
        model: nn.Module | None = None,
        mesh: DeviceMesh | ProcessGroup | None = None,
        precision: Precision | None = None,
        bucket_mb: float = 25,
        max_grad_norm: float | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        sync_init: bool = True,
        skip_nonfinite: bool = True,
        reshard_after_forward: bool = True,
        units: Sequence[Any] | None = None,
    ) -> None:
        options = Options(
            stage=stage,
            bucket_mb=bucket_mb,
            max_grad_norm=max_grad_norm,
            reduction=reduction,
            sync_init=sync_init,
            skip_nonfinite=skip_nonfinite,
            precision=precision if precision is not None else Precision(),
            reshard_after_forward=reshard_after_forward,
            units=None if units is None else tuple(units),
        )
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(f"model must be an nn.Module or None, got {type(model).__name__}")
        if isinstance(params, nn.Module):
            model, params = params, params.parameters()
        if options.needs_model and model is None:
            raise ConfigError(
                "stage 3 gathers parameters at the boundaries of modules, so it needs the module: "
                "pass model=, or the module itself as the first argument"
            )
        if not options.needs_model and (units is not None or not reshard_after_forward):
            warnings.warn(
                "units and reshard_after_forward have no effect below stage 3", stacklevel=2
            )
        # torch's own keys, so that state dicts, schedulers and other optimizers find them.
        plain = torch.optim.AdamW([torch.empty(0)], betas=betas, eps=eps).defaults
        defaults = dict(
            plain,
            lr=lr,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._engine: Engine | None = None
        # Never assigned anew: wrappers that copy __dict__, as Lightning's, share it.
        self._consolidated: list[dict[int, dict[str, Any]]] = []
        self._is_built = False
        super().__init__(params, defaults)
        for group in self.param_groups:
            check_group(group)
        self._build(options, None if model is None else unwrap(model), mesh)
        self._is_built = True

    def _build(
        self,
        options: Options,
        model: nn.Module | None,
        mesh: DeviceMesh | ProcessGroup | None,
    ) -> None:
        parameters = list(chain.from_iterable(group["params"] for group in self.param_groups))
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        others = other_tensors(parameters, model)
        every = {p: f"parameter {number}" for number, p in enumerate(parameters)}
        every.update(() if model is None else ((p, name) for name, p in model.named_parameters()))
        real = [parameter for parameter in every if not parameter.is_meta]
        device = real[0].device if real else device_of(mesh)
        named = in_forward_order(self.param_groups, model)
        transport = connect(mesh, device)
        engine = Engine(options, transport)
        engine.groups = lambda: self.param_groups
        self.shown_state = ShownState(engine)
        if model is not None:
            engine.model = weakref.ref(model)
        engine.on_added = self._show_state
        engine.on_close = self._engine_closed
        self.notice_backwards(engine)
        on_meta = [name for p, name in every.items() if p.is_meta]
        description = {**options.describe(), **describe_groups(self.param_groups)}
        listed = ", ".join(on_meta[:3]) + (" ..." if len(on_meta) > 3 else "")
        description["the parameters on the meta device"] = f"{len(on_meta)} {listed}".strip()
        try:
            engine.parameters.leave_meta(every, device)
            if engine.shards_parameters and model is not None:
                engine.sharded.use_units(model)
            engine.add(named, {**description, **describe_others(others)})
            if transport.distributed:
                guard = DDPGuard(engine.slot_of, refuse=engine.shards_parameters)
                engine.gradients.ddp_owns_gradients = guard
                if engine.shards_parameters:
                    guard()
            if engine.shards_parameters and model is not None:
                frozen = frozen_parameters(model, set(trainable))
                for other in engines_of(parameter for _, parameter in frozen):
                    _refuse_trained(frozen, other)
                engine.sharded.shard_frozen(frozen)
            if options.sync_init:
                engine.broadcast(others)
            engine.sharded.complete()
            engine.parameters.complete()
        except BaseException:
            engine.close()
            raise
        self._engine = engine
        self._show_state(trainable)

    def _engine_closed(self, engine: Engine) -> None:
        if self._engine is engine:
            self.state.clear()
            self.shown_state.forget()

    def _show_state(self, parameters: Iterable[nn.Parameter]) -> None:
        self.shown_state.show(parameters, self.state)

    @property
    def engine(self) -> Engine:
        """The engine that does the work."""
        if self._engine is None or self._engine.is_closed:
            raise ConfigError(
                "this optimizer cannot work: it was closed, it is a copy, or a newer one took over "
                "its parameters. Build one with zeroshard.AdamW(...)"
            )
        return self._engine

    # --- what torch.optim.Optimizer has

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            GradientError: a gradient was left local by `no_sync()`.
            ConfigError: a parameter was replaced, moved or cast since construction.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._consolidated.clear()
        engine = self.engine
        self.shown_state.take_over(self.state)
        if self._join_config.enable:
            share_options(engine, has_inputs=True)
        engine.step()
        return loss

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also ends what an exception in backward left under way."""
        if self._engine is not None:
            self._engine.abandon()
        super().zero_grad(set_to_none)
        if self._engine is not None:
            self._engine.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; every rank must add the same parameters."""
        if self._is_built:
            self.engine  # noqa: B018 - raises if it was closed
        super().add_param_group(param_group)
        if not self._is_built:
            return
        group = self.param_groups[-1]
        try:
            check_group(group)
            engine = self.engine
            named = not_trained_yet(self.param_groups, engine.slot_of, engine.model())
            engine.add(named, describe_groups(self.param_groups))
        except Exception:
            self.param_groups.pop()
            raise
        self._show_state(parameter for _, parameter in named)

    def state_dict(self) -> dict[str, Any]:
        """State and param groups; never communicates.

        After `consolidate_state_dict` the rank that it gathered to returns the whole state in the
        format of torch's AdamW. Otherwise every rank returns its slices as `ShardTensor`.
        """
        hooks = self._optimizer_state_dict_post_hooks
        self._optimizer_state_dict_post_hooks = OrderedDict()  # they are for what we return
        try:
            packed = super().state_dict()
        finally:
            self._optimizer_state_dict_post_hooks = hooks
        if self._consolidated:
            packed["state"] = {key: dict(entry) for key, entry in self._consolidated[0].items()}
            if is_updated_by_torch(self.engine):  # which takes the implementation from the file
                packed["param_groups"] = [dict(g, fused=True) for g in packed["param_groups"]]
        else:
            packed["state"] = {k: StateShard.entries(e) for k, e in packed["state"].items()}
        for hook in hooks.values():
            replaced = hook(self, packed)
            packed = packed if replaced is None else replaced
        return packed

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state to one rank, for the next `state_dict()` there.

        Every rank must call it. The result stands until the next step.

        Args:
            to: rank in the shard group.
        """
        self.engine.check_can_step("consolidate_state_dict")
        self.shown_state.take_over(self.state)
        parameters = list(chain.from_iterable(group["params"] for group in self.param_groups))
        whole = consolidate(self.engine, parameters, to)
        self._consolidated[:] = [whole] if self.engine.transport.rank == to else []

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's AdamW format, or what this rank's own `state_dict()` returned.

        Nothing is cast or moved, and nothing is communicated: every rank passes the same whole
        state, or its own slices. Load the model first.

        Raises:
            ConfigError: groups or shapes that do not fit.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        check_groups(self.param_groups, state_dict["param_groups"])
        engine = self.engine
        engine.check_can_step("load_state_dict")
        groups = list(zip(self.param_groups, state_dict["param_groups"], strict=True))
        loaded = {
            engine.slot_of[parameter]: state_dict["state"].get(key, {})
            for group, saved in groups
            for key, parameter in zip(saved["params"], group["params"], strict=True)
            if parameter in engine.slot_of
        }
        for group, saved in groups:
            check_group({**group, **saved})
        slices = {slot: slices_of(engine, slot, saved) for slot, saved in loaded.items()}
        # What the model's own load_state_dict wrote must not count as a later write.
        engine.masters.look_at_writes(given=[s for s, local in slices.items() if has_master(local)])
        for slot, local in slices.items():  # everything fits: now change it
            load_slot(engine, slot, local)
        for group, saved in groups:
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.shown_state.show_all(self.state)
        self._consolidated.clear()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._engine = None
        self._is_built = True
        self._consolidated = []
        super().__setstate__(state)

    def __repr__(self) -> str:
        text = super().__repr__()
        if self._engine is None:
            return text
        return f"{text}\n{summary_of(self._engine)}"

    # --- what it has beyond

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside accumulate on their rank, at the cost of a full gradient per rank.

        The next backward outside reduces the sum. `step()` before that raises `GradientError`.
        """
        return self.engine.gradients.no_sync()

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients in place so that their global norm is at most `max_norm`.

        Args:
            max_norm: the largest norm allowed.
            norm_type: order of the norm; may be inf.
            error_if_nonfinite: raise instead, which waits for the device.

        Returns:
            [] fp32, the norm before clipping, on the device.

        Raises:
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        """
        engine = self.engine
        engine.gradients.close()
        used, _ = engine.gradients.collect()
        if not used:
            return torch.zeros((), dtype=torch.float32, device=engine.counters.counts.device)
        norm = engine.grad_norm(used, float(norm_type))
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise GradientError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot "
                "be clipped. To disable this error and scale the gradients by the non-finite norm "
                "anyway, set `error_if_nonfinite=False`"
            )
        engine.scale_gradients(norm, float(max_norm))
        return norm

    def memory(self) -> dict[str, int]:
        """Bytes held on this rank by category; `optimizer_state` is master + moments."""
        return memory_of(self.engine)

    @property
    def skipped_steps(self) -> Tensor:
        """[] int64 on the device: steps skipped because a gradient was Inf or NaN."""
        return self.engine.skips.total

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Re-read masters from the parameters, after a write that moved no version counter.

        Needed after ``p.data.copy_()`` with ``Precision(master="fp32")``; every rank must call it.
        """
        self.engine.check_can_step("refresh_master")
        self.engine.masters.refresh()

    def close(self) -> None:
        """Remove every hook and leave plain, whole parameters; gradients are dropped.

        Under stage 3 every rank must call it.
        """
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _refuse_trained(frozen: Sequence[tuple[str, nn.Parameter]], other: Engine) -> None:
    """Raise if another optimizer trains one of the parameters that are frozen for ours."""
    taken = [name for name, parameter in frozen if parameter in other.slot_of]
    if taken:
        raise ConfigError(
            f"{taken[0]!r} is trained by another zeroshard optimizer, which frees it when it sees "
            "fit: under stage 3 use one optimizer, with a param group for each. If you do not need "
            "the other one any more, close() it: it lives as long as the parameters do"
        )
