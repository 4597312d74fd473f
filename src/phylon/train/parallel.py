"""A model over several processes by PyTorch's own engines: DDP (weights everywhere), FSDP2 (weights in shards, a block
at a time). The rest of the trainer sees plain local tensors, and whole ones in checkpoints."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from phylon.layers.ffn.routers import GroupedSigmoidRouterModule
from phylon.model import Model
from phylon.model.block import BlockModule
from phylon.train.world import World

Kind = Literal["ddp", "fsdp"]


class Parallel:
    """``model`` over the processes of ``world``.

    ``called`` is what an objective calls in its place. Gradients come out as the *mean* over processes of each one's
    sum, which is what both engines compute: divide by (count / processes) for the exact gradient of the whole batch.
    """

    def __init__(self, model: Model, world: World, kind: Kind) -> None:
        self.model, self.world = model, world
        self.kind = kind if world.size > 1 else None
        self.called: Any = model
        self._ddp: DistributedDataParallel | None = None
        if self.kind == "ddp":
            # What an objective does not use (a head that has no targets) takes no gradient, and must not be waited for.
            self._ddp = DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)
            self.called = _Through(self._ddp, model)
        elif self.kind == "fsdp":
            mesh = init_device_mesh(model.device.type, (world.size,))
            for block in [m for m in model.modules() if isinstance(m, BlockModule)]:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self._shards = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
        self._local = {
            name: nn.Parameter(p.to_local(), requires_grad=p.requires_grad) for name, p in self._shards.items()
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        """What this process trains: every parameter, or its shard of each."""
        return {name: self._local.get(name, p) for name, p in self.model.named_parameters()}

    @contextmanager
    def part(self, last: bool) -> Generator[None]:
        """Around the forward and backward pass of one part of a batch; gradients are exchanged after the last."""
        if self._ddp is not None and not last:
            with self._ddp.no_sync():
                yield
            return
        if self.kind == "fsdp":
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    def take_gradients(self) -> None:
        """Hand the shards' gradients to the local parameters."""
        for name, p in self._shards.items():
            self._local[name].grad = None if p.grad is None else p.grad.to_local()  # type: ignore[union-attr]
            p.grad = None

    def norm(self, value: float) -> float:
        """The norm of the whole gradient, from that of this process's part of it."""
        return self.world.sum([value**2])[0] ** 0.5 if self.kind == "fsdp" else value

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """``tensors`` by parameter (or ``<what>.<parameter>``) with every shard put together; all must call it."""
        return {name: self._whole(name, tensor) for name, tensor in tensors.items()}

    def own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The reverse of ``whole``: this process's part of each."""
        return {name: self._own(name, tensor) for name, tensor in tensors.items()}

    def sum_loads(self) -> None:
        """Add up what the routers counted, before their biases are moved."""
        if self.world.size > 1:
            for module in self.model.modules():
                if isinstance(module, GroupedSigmoidRouterModule) and module.load is not None:
                    dist.all_reduce(module.load)

    def _shard_of(self, name: str) -> DTensor | None:
        return self._shards.get(name, self._shards.get(name.partition(".")[2]))

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return tensor.full_tensor()
        shard = self._shard_of(name)
        if shard is None or tensor.shape != shard.to_local().shape or not tensor.ndim:
            return tensor
        placed = DTensor.from_local(
            tensor, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
        )
        return placed.full_tensor()

    def _own(self, name: str, tensor: Tensor) -> Tensor:
        shard = self._shard_of(name)
        if shard is None or tensor.shape != shard.shape:
            return tensor
        return distribute_tensor(tensor.to(shard.device), shard.device_mesh, shard.placements).to_local()


class _Through:
    """The model as an objective sees it, called through the wrapper that exchanges gradients."""

    def __init__(self, wrapper: nn.Module, model: Model) -> None:
        self._wrapper, self._model = wrapper, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._model(*args, **kwargs)
        return self._wrapper(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
