"""A model over several processes by PyTorch's own engines: DDP (weights everywhere), FSDP2 (weights in shards, a block
at a time). The rest of the trainer sees plain local tensors, and whole ones in checkpoints."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phylon.layers.ffn.routers import GroupedSigmoidRouterModule
from phylon.model import Model
from phylon.model.block import BlockModule
from phylon.spec.errors import UserError
from phylon.train.checkpoint import check_model_tensors, model_tensors
from phylon.train.world import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# The engines are imported where they are used: they take longer to import than all the rest of PyTorch.
Kind = Literal["ddp", "fsdp"]


def check_parallel(recipe: Any, size: int) -> None:
    """Refuse what ``size`` processes cannot share: fewer rows than parts, and shards for what needs whole matrices."""
    run = recipe.run
    if size > 1 and recipe.objective.whole_batch:
        raise UserError("this objective needs its batch whole, and several processes would share it; start one")
    if size > 1 and not recipe.objective.by_tokens and run.batch_size < size * run.accumulate:
        raise UserError(
            f"a batch of {run.batch_size} rows cannot be shared by {size} processes in {run.accumulate} parts each; "
            f"give run.batch_size={size * run.accumulate} or more"
        )
    if recipe.run.parallel == "fsdp" and size > 1:
        kind = type(recipe.optim).__name__
        if kind in ("Adafactor", "Muon"):
            raise UserError(
                f"{kind.lower()} needs whole matrices, and fsdp keeps shards; set run.parallel=ddp or adamw"
            )


class Parallel:
    """``model`` over the processes of ``world``.

    ``called`` is what an objective calls in its place. ``unused``: the objective leaves some parameters without a
    gradient (a head that has no targets), which DDP must not wait for. Gradients come out as the *mean* over processes
    of each one's sum, which is what both engines compute: divide by (count / processes) for the exact gradient of the
    whole batch.
    """

    def __init__(self, model: Model, world: World, kind: Kind, *, unused: bool = False) -> None:
        self.model, self.world = model, world
        self.kind = kind if world.size > 1 else None
        self.called: Any = model
        self._ddp: Any = None
        self._shards: dict[str, DTensor] = {}
        self._local: dict[str, nn.Parameter] = {}
        if self.kind == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            self._ddp = DistributedDataParallel(model, find_unused_parameters=unused)
            self.called = _Through(self._ddp, model)
        elif self.kind == "fsdp":
            self._shard()

    def _shard(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = self.model
        mesh = init_device_mesh(model.device.type, (self.world.size,))
        for block in [m for m in model.modules() if isinstance(m, BlockModule)]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._shards = dict(model.named_parameters())  # type: ignore[arg-type]
        self._local = {
            name: nn.Parameter(p.to_local(), requires_grad=p.requires_grad) for name, p in self._shards.items()
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        """What this process trains: every parameter, or its shard of each."""
        return {name: self._local.get(name, p) for name, p in self.model.named_parameters()}

    @contextmanager
    def part(self, exchange: bool) -> Generator[None]:
        """Around the forward and backward pass of one part of a batch, whose gradients are exchanged now or later."""
        if self._ddp is not None and not exchange:
            with self._ddp.no_sync():
                yield
            return
        if self.kind == "fsdp":
            self.model.set_requires_gradient_sync(exchange)  # type: ignore[operator]
        yield

    def reshard(self) -> None:
        """Give up what a forward pass without a backward one leaves gathered (the root): the shards may change now."""
        if self.kind == "fsdp":
            self.model.reshard()  # type: ignore[operator]

    def take_gradients(self) -> None:
        """Hand the shards' gradients to the local parameters."""
        for name, p in self._shards.items():
            self._local[name].grad = None if p.grad is None else p.grad.to_local()  # type: ignore[union-attr]
            p.grad = None

    def norm(self, value: float) -> float:
        """The norm of the whole gradient, from that of this process's part of it."""
        return self.world.sum([value**2])[0] ** 0.5 if self.kind == "fsdp" else value

    def finite(self) -> bool:
        """Whether every number of this process's parameters is one."""
        return all(bool(torch.isfinite(p.detach()).all()) for p in self.parameters().values())

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """``tensors`` by parameter (or ``<what>.<parameter>``) with every shard put together; all must call it."""
        return {name: self._whole(name, tensor) for name, tensor in tensors.items()}

    def own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The reverse of ``whole``: this process's part of each."""
        return {name: self._own(name, tensor) for name, tensor in tensors.items()}

    def load_model(self, tensors: dict[str, Tensor]) -> None:
        """Put the whole tensors of a checkpoint into the model, each process its own part."""
        check_model_tensors(self.model, tensors)
        own = self.own(tensors)
        with torch.no_grad():
            for name, target in model_tensors(self.model).items():
                shard = self._shards.get(name)
                (target if shard is None else shard.to_local()).copy_(own[name])

    def sum_loads(self) -> None:
        """Add up what the routers counted, before their biases are moved."""
        if self.world.size > 1:
            for module in self.model.modules():
                if isinstance(module, GroupedSigmoidRouterModule) and module.load is not None:
                    dist.all_reduce(module.load)

    def _shard_of(self, name: str) -> "DTensor | None":
        return self._shards.get(name, self._shards.get(name.partition(".")[2]))

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        shard = self._shard_of(name)
        if shard is None:
            return tensor
        if tensor.shape == shard.shape and hasattr(tensor, "full_tensor"):
            return tensor.full_tensor()  # type: ignore[operator]
        if tensor.shape != shard.to_local().shape or not tensor.ndim:
            return tensor
        from torch.distributed.tensor import DTensor

        placed = DTensor.from_local(
            tensor, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
        )
        return placed.full_tensor()

    def _own(self, name: str, tensor: Tensor) -> Tensor:
        shard = self._shard_of(name)
        if shard is None or tensor.shape != shard.shape:
            return tensor
        from torch.distributed.tensor import distribute_tensor

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
