"""The processes of a run: who is first, what they agree on. Started by ``torchrun``, which sets the environment."""

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from phylon.spec.errors import UserError

T = TypeVar("T")
MEETING = timedelta(minutes=5)  # how much later than another a process may begin
# How the back ends say that a peer has died.
_LOST = ("connection closed by peer", "connection reset", "broken pipe", "timed out", "nccl", "gloo", "socket")


class PeerLost(UserError):
    """Another process is gone; where it has said why, nothing more is to be said."""


@dataclass(frozen=True)
class World:
    """``size`` processes, this one being number ``rank``; ``local_rank`` numbers the ``local_size`` of this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def failed(self, error: UserError) -> None:
        """Note that this process ends with ``error``, and whether another one says the same."""
        if self.size > 1 and not hasattr(error, "said_elsewhere"):
            error.said_elsewhere = said_elsewhere(str(error))  # type: ignore[attr-defined]

    def sum(self, values: list[float]) -> list[float]:
        """The sum over all processes of each number, in fp64."""
        return self._reduced(values, dist.ReduceOp.SUM) if self.size > 1 else values

    def most(self, values: list[float]) -> list[float]:
        """The largest over all processes of each number."""
        return self._reduced(values, dist.ReduceOp.MAX) if self.size > 1 else values

    def gather(self, value: T) -> list[T]:
        """What every process has, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first process makes, on all of them; its ``UserError`` is everybody's."""
        if self.size == 1:
            return make()
        made: list[Any] = [None, None]
        error: BaseException | None = None
        if self.first:
            try:
                made[0] = make()
            except BaseException as caught:
                error, made[1] = caught, str(caught) or type(caught).__name__
        dist.broadcast_object_list(made)
        if error is not None:
            raise error
        if made[1] is not None:
            found = UserError(made[1])
            found.said_elsewhere = True  # type: ignore[attr-defined]
            raise found
        return made[0]

    def one_after_the_other(self, make: Callable[[bool], T]) -> T:
        """``make(True)`` in the first process, and then ``make(False)`` in the others, which find what it has left."""
        if self.size == 1:
            return make(True)
        kept: list[T] = []
        self.from_first(lambda: kept.append(make(True)))
        return kept[0] if self.first else make(False)

    def _reduced(self, values: list[float], op: Any) -> list[float]:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()


def join_world(device: str) -> tuple[World, str]:
    """The processes that ``torchrun`` has started, and the device of this one; alone without ``torchrun``."""
    world = launched()
    if world.size == 1:
        return world, device
    rank, size, local = world.rank, world.size, world.local_rank
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if cuda:
        if local >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise UserError(f"process {local} of this machine finds {count} GPUs; start as many processes as GPUs")
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    elif device == "auto":
        device = "cpu"
    if rank:
        logging.getLogger("phylon.data").setLevel(logging.ERROR)  # the first one names what is passed over
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", store=_met(size), rank=rank, world_size=size)
    return world, device


def launched() -> World:
    """The processes as ``torchrun``'s environment tells of them, whether or not they are there."""
    size = _number("WORLD_SIZE", 1, 1)
    if size == 1:
        return World()
    rank, local = (_number(name, 0, 0, size - 1) for name in ("RANK", "LOCAL_RANK"))
    return World(rank, size, local, _number("LOCAL_WORLD_SIZE", 1, 1, size))


def _number(name: str, default: int, least: int, most: int | None = None) -> int:
    """What the environment says, which somebody may have set by hand."""
    said = os.environ.get(name)
    if said is None:
        return default
    if not said.isdecimal() or int(said) < least or (most is not None and int(said) > most):
        until = "" if most is None else f" to {most}"
        raise UserError(f"{name} is {said!r} and must be a whole number from {least}{until}; torchrun sets it")
    return int(said)


def _met(size: int) -> dist.Store:
    """The store by which the processes know of each other, once all of them are there."""
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=MEETING))
    except (RuntimeError, ValueError) as error:  # the latter of what the environment lacks, or of no number
        if isinstance(error, ValueError):
            raise UserError(f"processes that are started by hand need to know of each other: {error}") from None
        raise UserError(
            f"the {size} processes of this run have not met within {MEETING.total_seconds():.0f} seconds: start all of "
            "them, with one MASTER_ADDR and MASTER_PORT"
        ) from None
    store.set_timeout(default_pg_timeout)
    return store


def leave_world(world: World) -> None:
    """Take leave of the other processes."""
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def lost_peer(error: BaseException) -> bool:
    """Whether an error says that another process is gone."""
    if isinstance(error, UserError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in _LOST)


_HERE_WAIT = timedelta(seconds=1)  # for a store that is there, or gone
_STORE_WAIT = timedelta(seconds=15)  # how much later than another process the first one may begin
_FIRST_WAIT = timedelta(seconds=5)  # how much later it may find the same mistake


def said_elsewhere(line: str, *, lost: bool = False) -> bool:
    """Whether another process of this start says ``line``; if not, this one is to say it.

    The first process says what all of them find, another one what it alone does. ``lost``: ``line`` only says that a
    process is gone, so that anything said elsewhere is enough. The processes know of each other by the store of their
    launcher, which is there before they meet and after they have parted. Where it shares none there is that of the
    first process, which is gone with it: then the first has ended, and told why.
    """
    rank = os.environ.get("RANK", "0")
    start = f"phylon/said/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    said = f"{start}/{hashlib.blake2b(line.encode(), digest_size=8).hexdigest()}"
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = _HERE_WAIT if rank == "0" or lost else _STORE_WAIT
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)
        if lost and store.add(start, 0):
            return True
        if not lost:
            store.add(start, 1)
        if rank == "0":
            store.set(said, "")
            return False
        if store.add(f"{said}/others", 1) > 1:
            return True
    except (KeyError, ValueError, RuntimeError):
        # Nobody can ask whether a first process that is gone was killed; the second says so for all others.
        return rank not in (("0", "1") if lost else ("0",))
    try:
        store.wait([said], _FIRST_WAIT)
    except dist.DistStoreError:
        return False
    except RuntimeError:  # the first process has ended meanwhile
        return True
    return True
