"""How the ranks of a ring exchange arrays: a protocol, and two rings that follow it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from scaledot import _arrays
from scaledot._errors import missing_extra, type_error, value_error
from scaledot._typing import Array

T = TypeVar("T")
Shape = tuple[int, ...]


class Transport(Protocol):
    """One rank of a ring.

    All ranks call `rotate` equally often and in the same order, with the same ``hop``.
    """

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def rotate(
        self, arrays: Sequence[Array], shapes: Sequence[Shape], hop: int = 1
    ) -> Callable[[], list[Array]]:
        """Start to pass arrays to the rank ``hop`` further on, and return how to wait.

        Parameters
        ----------
        arrays : sequence of array
            What is sent; not written before the wait is over.
        shapes : sequence of tuple
            Shapes of what arrives from the rank ``hop`` back, with the dtypes of ``arrays``.
        hop : int
            Distance to the receiver.

        Returns
        -------
        callable
            Waits until all is sent and received, and returns what was received.
        """


def transport_of(group: Any) -> Transport:
    """Transport of what a caller gave as ``group``: a transport, a process group, or None."""
    if callable(getattr(group, "rotate", None)):
        return cast(Transport, group)
    try:
        import torch.distributed as dist
    except ImportError:
        raise missing_extra("torch", "torch") from None
    hint = "Start the processes with torchrun and call torch.distributed.init_process_group(...)."
    if not dist.is_available() or not dist.is_initialized():
        raise value_error(
            "group must be a running group of torch.distributed",
            "no group, and none is initialized" if group is None else type(group).__name__, hint,
        )
    is_outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and not is_outside and not isinstance(group, dist.ProcessGroup):
        raise type_error(
            "group must be a ProcessGroup, or have rank, world_size and rotate",
            type(group).__name__,
            "A DeviceMesh has its group as mesh.get_group().",
        )
    if is_outside or dist.get_rank(group) < 0:
        raise value_error(
            "this process must belong to group", "a group without it",
            "Call it in the processes of the group alone.",
        )  # fmt: skip
    return ProcessGroupRing(group)


class ProcessGroupRing:
    """The ring of a group of `torch.distributed`, in the order of its ranks."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._group: Any = group if group is not None else dist.group.WORLD
        self.rank: int = dist.get_rank(self._group)
        self.world_size: int = dist.get_world_size(self._group)

    def rotate(
        self, arrays: Sequence[Array], shapes: Sequence[Shape], hop: int = 1
    ) -> Callable[[], list[Array]]:
        """Start to pass arrays on; see `Transport`."""
        import torch
        import torch.distributed as dist

        if hop % self.world_size == 0:
            return functools.partial(list, arrays)
        sent = [self._tensor(x) for x in arrays]
        received = [
            torch.empty(_bytes(x, shape) if isinstance(x, np.ndarray) else shape,
                        dtype=s.dtype, device=s.device)
            for x, s, shape in zip(arrays, sent, shapes, strict=True)
        ]  # fmt: skip
        to, source = (
            dist.get_global_rank(self._group, (self.rank + step) % self.world_size)
            for step in (hop, -hop)
        )
        # Both sides know what is empty, and need not tell each other so.
        operations = [
            dist.P2POp(start, x, peer, self._group)
            for start, tensors, peer in ((dist.isend, sent, to), (dist.irecv, received, source))
            for x in tensors if x.numel()
        ]  # fmt: skip
        with self._noting(to, source):  # a peer may be known to be dead before a message starts
            works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> list[Array]:
            with self._noting(to, source):
                for work in works:
                    work.wait()
            sent.clear()  # what was sent had to live until now
            return [
                _from_bytes(y, x, shape) if isinstance(x, np.ndarray) else y
                for x, y, shape in zip(arrays, received, shapes, strict=True)
            ]

        return wait

    @contextlib.contextmanager
    def _noting(self, to: int, source: int) -> Iterator[None]:
        """Add to errors of messages between whom they were."""
        try:
            yield
        except RuntimeError as error:
            error.add_note(
                f"scaledot: rank {self.rank} of {self.world_size} was sending to process {to} "
                f"and receiving from process {source}; one of them has failed or is late."
            )
            raise

    def _tensor(self, x: Array) -> Any:
        """Contiguous tensor; an array of NumPy is sent as bytes, whatever its dtype."""
        import torch
        import torch.distributed as dist

        if not isinstance(x, np.ndarray):
            return x.detach().contiguous()
        known = dist.get_backend_config(self._group)
        device = "cpu" if "cpu:" in known else f"cuda:{torch.cuda.current_device()}"
        plain = np.array(x, order="C", copy=True).reshape(-1).view(np.uint8)
        return torch.from_numpy(plain).to(device)


def _bytes(x: Any, shape: Shape) -> Shape:
    return (int(np.prod(shape, dtype=np.int64)) * x.dtype.itemsize,)


def _from_bytes(received: Any, x: Any, shape: Shape) -> Array:
    return received.cpu().numpy().view(x.dtype).reshape(shape)


class InProcessRing:
    """A ring of threads in one process, for tests and notebooks.

    Parameters
    ----------
    world_size : int
        Number of ranks.
    timeout : float
        Seconds that a rank waits for another before it gives up.

    Examples
    --------
    >>> import numpy as np, scaledot as sd
    >>> def pass_on(member):
    ...     return member.rotate([np.array([member.rank])], [(1,)])()[0].item()
    >>> sd.InProcessRing(3).run(pass_on)
    [2, 0, 1]
    """

    def __init__(self, world_size: int, *, timeout: float = 60.0) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise value_error("world_size must be a positive int", repr(world_size), "Pass 2.")
        self.world_size = world_size
        self.timeout = timeout

    def run(self, function: Callable[[Transport], T]) -> list[T]:
        """Call a function in one thread for each rank and return its results in rank order.

        Context variables, and whether PyTorch records graphs, are those of the caller.

        Parameters
        ----------
        function : callable
            ``function(group)``; pass ``group`` on to `ring_attention`.

        Returns
        -------
        list
            Results of ranks 0, 1, ...

        Raises
        ------
        Exception
            The first error of a rank; the others then end with a ConnectionError.
        """
        count = self.world_size
        queues = {(a, b): queue.SimpleQueue[Any]() for a in range(count) for b in range(count)}
        members = [_Member(rank, count, queues, self.timeout) for rank in range(count)]
        results: list[Any] = [None] * count
        errors: list[BaseException | None] = [None] * count
        modes = _torch_modes()

        def work(member: _Member) -> None:
            try:
                with modes():
                    results[member.rank] = function(member)
            except BaseException as error:  # raised again by the caller's thread
                errors[member.rank] = error
            member.leave()

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(work, m), daemon=True)
            for m in members
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raised = [e for e in errors if e is not None]
        # A rank that failed by itself says more than those that missed it afterwards.
        for found in sorted(raised, key=lambda e: isinstance(e, ConnectionError)):
            raise found
        return results


def _torch_modes() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What puts another thread into the modes of this one: PyTorch holds them by thread."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return contextlib.nullcontext
    is_inference, is_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad):
            yield

    return entered


class _Member:
    """One rank of an `InProcessRing`."""

    def __init__(self, rank: int, world_size: int, queues: Any, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._queues = queues
        self._timeout = timeout

    def rotate(
        self, arrays: Sequence[Array], shapes: Sequence[Shape], hop: int = 1
    ) -> Callable[[], list[Array]]:
        """Start to pass arrays on; see `Transport`. Nothing is copied."""
        source = (self.rank - hop) % self.world_size
        self._queues[self.rank, (self.rank + hop) % self.world_size].put(list(arrays))

        def wait() -> list[Array]:
            try:
                found = self._queues[source, self.rank].get(timeout=self._timeout)
            except queue.Empty:
                raise TimeoutError(
                    f"rank {self.rank} waited {self._timeout} s for rank {source}"
                ) from None
            if found is None:
                raise ConnectionError(f"rank {source} has ended, and rank {self.rank} waits for it")
            places = [(tuple(x.shape), _arrays.dtype_name(x)) for x in found]
            wanted = [(s, _arrays.dtype_name(x)) for s, x in zip(shapes, arrays, strict=True)]
            if places != wanted:
                raise ConnectionError(f"rank {source} sent {places}, expected were {wanted}")
            return cast(list[Array], found)

        return wait

    def leave(self) -> None:
        """Tell all others that nothing more will come."""
        for rank in range(self.world_size):
            self._queues[self.rank, rank].put(None)
