"""The loader: torch's ``DataLoader`` over a ``StreamingDataset``, whose state is exactly what it handed out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ray_lance_stream.dataset import StreamingDataset
from ray_lance_stream.errors import ConfigError, StreamClosedError, explain
from ray_lance_stream.plan import require_int

logger = logging.getLogger("ray_lance_stream")


class StreamingDataLoader(DataLoader[Any]):
    """Batches of a :class:`StreamingDataset`; parameters as torch's ``DataLoader``.

    Rows are fetched, collated and pinned in the trainer's process, so batches are those of a standard
    ``DataLoader`` whatever ``num_workers`` is, and after each batch the dataset's state covers that batch and
    nothing more. What costs time, reading and transforming, is done by ``num_workers`` Ray prefetchers.

    A batch that fails on its way, in ``collate_fn`` say, was not handed out: its rows do not count, and iterating
    anew begins with them.

    Args:
        dataset: The dataset; not a subclass that overrides ``__iter__``.
        batch_size: Rows of a batch, or None for single rows. Where ``num_splits`` is not a multiple of
            ``world_size`` it must be a multiple of the splits this rank owns, or ranks would drift apart.
        shuffle: False or None; the dataset shuffles.
        sampler: None; the dataset decides the order.
        batch_sampler: None; the dataset decides the order.
        num_workers: Ray prefetchers; 0 reads in this process. Changes speed, never a batch.
        collate_fn: Makes a batch of a list of rows, in this process; by default torch's.
        pin_memory: Copies tensors to page-locked memory, in this process.
        drop_last: False: a tail that is thrown away cannot be part of a state.
        timeout: 0. Waiting for prefetchers is bounded by the stream, which replaces those that are lost.
        worker_init_fn: No use with prefetchers: a transform that is a class is built once in each.
        multiprocessing_context: No use with prefetchers: they are Ray actors.
        generator: As torch's; seeds no row and no order here.
        prefetch_factor: No use with prefetchers: how far they read ahead is bounded in bytes.
        persistent_workers: False: prefetchers outlive an epoch anyhow.
        pin_memory_device: As torch's.
        in_order: True: there is one order.

    Raises:
        TypeError: ``dataset`` is none, or overrides ``__iter__``.
        ConfigError: An argument cannot work; a ``ValueError``, like torch's own.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        _check_dataset(dataset)
        require_int("num_workers", num_workers, minimum=0, remedy="pass the number of prefetchers, 0 for none")
        _refuse(in_order=(in_order, True), persistent_workers=(persistent_workers, False), drop_last=(drop_last, False))
        of_processes: dict[str, Any] = {
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "prefetch_factor": prefetch_factor,
        }
        if num_workers > 0 and not timeout < 0:
            unused = [name for name, value in of_processes.items() if value not in (None, 0)]
            of_processes = {}  # torch accepts them only with processes of its own
        else:
            unused = ["timeout"] if timeout > 0 else []
            of_processes["timeout"] = min(timeout, 0)  # torch refuses a negative one, and in process any other
        super().__init__(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=0,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            generator=generator,
            pin_memory_device=pin_memory_device,
            **of_processes,
        )
        _check_batch_size(dataset, batch_size)
        if unused:
            logger.warning(
                "StreamingDataLoader does not use %s: rows are read by Ray prefetchers or in this process, never by "
                "worker processes of torch",
                ", ".join(unused),
            )
        self.num_prefetchers = num_workers
        dataset.use_prefetchers(num_workers)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's type is that of its own iterators
        """Iterates from where the dataset stands; one iterator of a dataset at a time.

        Raises:
            RuntimeError: Another iterator of the dataset is active, at the latest with the first batch.
        """
        return _Batches(self)

    def state_dict(self) -> dict[str, Any]:
        """Returns the dataset's state: what the batches handed out so far cover."""
        return self.dataset.state_dict()  # type: ignore[attr-defined, no-any-return]  # torch's type is Dataset

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves the dataset to a state; see ``StreamingDataset.load_state_dict``."""
        self.dataset.load_state_dict(state)  # type: ignore[attr-defined]


class _Batches(Iterator[Any]):
    """The batches of one pass. What fails before it is handed out is given back to the dataset."""

    def __init__(self, loader: StreamingDataLoader) -> None:
        self._dataset: Any = loader.dataset
        self._rows = _Rows(self._dataset)
        collate_fn = loader.collate_fn

        def collate(rows: Any) -> Any:
            try:
                return collate_fn(rows)
            except StopIteration as error:  # would look like the end of the data
                raise RuntimeError("collate_fn raised StopIteration before it returned a batch") from error

        # A loader of torch's own for this one pass, so that the pass has an end that can be brought about.
        self._batches: Iterator[Any] = iter(
            DataLoader(
                self._rows,
                batch_size=loader.batch_size,
                collate_fn=collate,
                pin_memory=loader.pin_memory,
                generator=loader.generator,
                pin_memory_device=loader.pin_memory_device,
            )
        )
        self._failure: str | None = None

    def __next__(self) -> Any:
        if self._failure is not None:
            raise StreamClosedError(
                explain(
                    "this iterator has ended with a failure",
                    found=self._failure,
                    expected="an iterator that has not failed",
                    remedy="iterate the loader anew, which begins with the rows of the batch that failed",
                )
            )
        mark, loads = self._dataset._mark(), self._dataset._loads
        self._rows.taken = 0
        try:
            batch = next(self._batches)
            if self._dataset._loads != loads:  # by collate_fn, or another thread
                raise StreamClosedError(
                    explain(
                        "the dataset was moved to a state while this batch was made",
                        found="load_state_dict within a batch, whose rows the state does not cover",
                        expected="a new iteration after it",
                        remedy="iterate the loader anew, which begins with the row after that state",
                    )
                )
            return batch
        except StopIteration:
            self._rows.close()
            raise
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            self._rows.close()
            # Else another iterator, or a state that was loaded, is what has moved the dataset.
            if self._rows.taken and self._dataset._loads == loads:
                self._dataset._rewind(mark)
            raise

    def close(self) -> None:
        """Ends the pass; the dataset may be iterated anew. Safe to repeat."""
        self._batches = iter(())
        self._rows.close()

    _shutdown_workers = close  # the name under which trainers end an iterator of torch's


class _Rows(IterableDataset[Any]):
    """One pass over a dataset, which counts the rows taken and can be ended."""

    def __init__(self, dataset: Any) -> None:
        self._iterator = iter(dataset)
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        row = next(self._iterator)
        self.taken += 1
        return row

    def close(self) -> None:
        """Ends the pass, as leaving a loop over it would. Safe to repeat."""
        self._iterator.close()


def _check_dataset(dataset: object) -> None:
    if not isinstance(dataset, StreamingDataset):
        raise TypeError(
            explain(
                "StreamingDataLoader needs a StreamingDataset of ray_lance_stream",
                found=f"an object of type {type(dataset).__module__}.{type(dataset).__qualname__}",
                expected="ray_lance_stream.StreamingDataset",
                remedy="import both classes from ray_lance_stream",
            )
        )
    if type(dataset).__iter__ is not StreamingDataset.__iter__:
        raise TypeError(
            explain(
                "a subclass that overrides __iter__ cannot say what it consumed",
                found=type(dataset).__qualname__,
                expected="StreamingDataset's own __iter__",
                remedy="change rows in transform or in collate_fn",
            )
        )


def _refuse(**arguments: tuple[object, object]) -> None:
    reasons = {
        "in_order": "batches have one order, or a state would mean nothing",
        "persistent_workers": "prefetchers outlive an epoch anyhow",
        "drop_last": "rows that are thrown away cannot be part of a state",
    }
    for name, (value, allowed) in arguments.items():
        if value != allowed:
            raise ConfigError(
                explain(
                    f"{name}={value!r} is not supported: {reasons[name]}",
                    found=f"{name}={value!r}",
                    expected=f"{name}={allowed!r}",
                    remedy="leave it out",
                )
            )


def _check_batch_size(dataset: StreamingDataset, batch_size: int | None) -> None:
    """Refuses a batch after which ranks that own unequally many splits would be in different cycles."""
    owned = len(dataset.owned_splits)
    if dataset.num_splits % dataset.world_size == 0 or (batch_size or 1) % owned == 0:
        return
    nearest = -(-(batch_size or 1) // owned)
    sizes = sorted({q * owned for q in (nearest - 1, nearest, nearest + 1) if q > 0})
    raise ConfigError(
        explain(
            f"{dataset.world_size} ranks share {dataset.num_splits} splits unequally, and batches of this size would "
            "put them into different cycles",
            found=f"batch_size={batch_size} on rank {dataset.rank}, which owns {owned} splits",
            expected=f"a multiple of {owned}, such as {', '.join(map(str, sizes))}",
            remedy="pass q * len(dataset.owned_splits), with the same q on every rank",
        )
    )
