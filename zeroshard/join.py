"""Uneven inputs: an optimizer in torch's `Join` context. Reduces and updates nothing itself.

A rank that has run out of inputs takes part, in each iteration of the others, in one backward that
gives no gradients, and in one step.
"""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from .engine import Engine
from .errors import ConfigError
from .transport import Op

__all__ = ["UnevenInputs", "share_options"]


class UnevenInputs(Joinable):
    """What makes an optimizer Joinable: ``with Join([optimizer]):``, in stages 1 and 2."""

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The engine that does the work."""

    def notice_backwards(self, engine: Engine) -> None:
        """Tell the context, where there is one, of every backward that reduces."""
        self._join: dict[str, Any] = {}  # shared by wrappers that copy __dict__, as Lightning's
        Joinable.__init__(self)
        engine.on_backward = self._notify

    @property
    def _join_config(self) -> Any:
        """What the context asks of its joinables; it assigns this."""
        return self._join["config"]

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._join["config"] = config

    def _notify(self) -> None:
        self.check_alone()
        Join.notify_join_context(self)

    def check_alone(self) -> None:
        """Raise where the context holds another joinable before this one."""
        if self._join_config.enable and not self._join_config.is_first_joinable:
            raise ConfigError(
                "Join: several joinables would communicate in another order on ranks that have "
                "joined: use one optimizer, with a param group for each, and no wrapper around the "
                "model"
            )

    def join_hook(self, **_: Any) -> JoinHook:
        """What a rank does that has no inputs left.

        Raises:
            ConfigError: a stage that communicates in forward, or a model in DDP.
        """
        if self.engine.shards_parameters:
            raise ConfigError(
                "Join: stage 3 gathers parameters in every forward, so that all ranks must have as "
                "many inputs: use stage=2, or give every rank as many batches"
            )
        if self.engine.gradients.ddp_owns_gradients():
            raise ConfigError(
                "Join: under DistributedDataParallel a rank that has joined is not given the "
                "gradients, which zeroshard needs there: remove the wrapper"
            )
        return _Hook(self)

    @property
    def join_device(self) -> torch.device:
        """Where the context communicates."""
        return self.engine.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """Over whom.

        Raises:
            ConfigError: without a process group, or with replicas beside the shards.
        """
        mesh = self.engine.transport.mesh
        if mesh is None or mesh.ndim > 1:
            raise ConfigError(
                f"Join needs one process group, and this optimizer has "
                f"{'none' if mesh is None else 'a mesh of two axes'}"
            )
        return mesh.get_group()


class _Hook(JoinHook):
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        """Take part in one iteration of the others."""
        engine: Engine = self.optimizer.engine
        self.optimizer.check_alone()
        notify, engine.on_backward = engine.on_backward, _nothing
        try:
            engine.backward_without_gradients()
        finally:
            engine.on_backward = notify
        share_options(engine, has_inputs=False)
        engine.step()
        self.optimizer.zero_grad()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined."""
        share_options(self.optimizer.engine, has_inputs=is_last_joiner)


@torch.no_grad()
def share_options(engine: Engine, *, has_inputs: bool) -> None:
    """Give ranks whose schedulers have stopped the options of those that go on.

    Args:
        engine: whose param groups.
        has_inputs: whether this rank goes on.

    Raises:
        ConfigError: those that go on differ; on every rank.
    """
    options = torch.tensor([_numbers(group) for group in engine.param_groups], dtype=torch.float64)
    both = torch.stack([options, -options])
    if not has_inputs:
        both.fill_(-math.inf)
    both = both.to(engine.device)
    engine.transport.all_reduce(both, "max", op=Op("options")).wait()
    largest, smallest = both[0].tolist(), (-both[1]).tolist()
    if largest != smallest:
        raise ConfigError(
            "Join: ranks that have inputs have different options (lr, betas, eps, weight decay): "
            f"from {smallest} to {largest}. After an epoch of uneven inputs bring the schedulers "
            "of all ranks to the same step"
        )
    if has_inputs:
        return
    for group, values in zip(engine.param_groups, largest, strict=True):
        lr, beta1, beta2, eps, weight_decay = values
        group.update(betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _numbers(group: dict[str, Any]) -> list[float]:
    return [float(group["lr"]), *map(float, group["betas"]), group["eps"], group["weight_decay"]]


def _nothing() -> None:
    pass
