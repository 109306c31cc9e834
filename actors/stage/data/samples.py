"""Samples of a rank's data-parallel replica, as micro-batches on the rank's device.

Shape suffixes: N samples, S = sequence + 1 tokens of a window, s tokens of a window that a rank has as inputs
(and their successors as targets), M micro-batches, T tokens of a micro-batch, t of these that a rank has
between tensor-parallel regions.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from braid.actors.config import Config
from braid.actors.stage.data.mixture import Mixture, open_splits
from braid.actors.stage.data.sample_order import samples_digest
from braid.actors.stage.model.context import ModuleContext
from braid.actors.stage.run.micro_batch import MicroBatch
from braid.actors.stage.state.parameters import Place
from braid.kernels.operators.context_blocks import (
    Documents,
    TokenOrder,
    causal_order,
    document_order,
    documents_of,
)
from braid.kernels.operators.dropout import token_numbers
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import beyond
from braid.scheduling.text.pattern import documents_seen

Batches = list[MicroBatch | None]
"""One entry for each micro-batch; None on a rank whose part of the model reads no tokens."""


_Own = tuple[torch.Tensor, torch.Tensor | None, list[Documents]] | None
"""A rank's part of its replica's samples: tokens and their successors, 2 x N x s; weights of the successors'
losses, N x s, None if all are 1; documents by micro-batch if tokens attend only to their own document. None
on a rank that reads no tokens."""
_Tokens = TypeVar("_Tokens")


class ReadingAhead(Generic[_Tokens]):
    """Calls ``read(step)`` one step ahead, in a thread: the tokens of a step are known in advance."""

    def __init__(self, read: Callable[[int], _Tokens]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reading")
        self._next: tuple[int, Future[_Tokens]] | None = None

    def of(self, step: int) -> _Tokens:
        """Return the result of ``read(step)``, or raise its error; begin to read for the next step."""
        ahead, self._next = self._next, None
        tokens = ahead[1].result() if ahead is not None and ahead[0] == step else self._read(step)
        self._next = step + 1, self._thread.submit(self._read, step + 1)
        return tokens

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class ReplicaSamples:
    """Training samples by step, read one step ahead, and samples for validation."""

    def __init__(
        self,
        directory: Path,
        config: Config,
        sequence: int,
        layout: ParallelLayout,
        place: Place,
        chunks: Collection[int],
        device: torch.device,
    ) -> None:
        """``place``: the rank's place in the mesh, which determines its replica's samples and its tokens of
        these. ``chunks``: numbers of the model's chunks on the rank.

        Raise `ValueError` as `open_splits` does.
        """
        self._config, self._layout, self._device, self._place = config, layout, device, place
        self._replica, self._context = place.index(layout.sample_factors), place.on("cp")
        validated = [name for name, data in config.data.sets.items() if data.validation_fraction > 0]
        self._train, self._validation = open_splits(directory, sequence, validated)
        self._validated = np.zeros(0, np.int64)
        if self._validation is not None:
            self._validated = self._validation.spread(config.train.validation_samples)
        ends = any(layout.is_first(chunk) or layout.is_last(chunk) for chunk in chunks)
        self._sees_tokens = ends or config.data.document_mask
        self._ahead = ReadingAhead(self._read)
        self._newest = np.zeros(0, np.int64)

    def of_step(self, step: int) -> Batches:
        """Return the micro-batches of a training step (from 0); those of the next step are read in the
        background.

        Weights of losses are such that the weighted sum over the global batch, divided by its number of
        targets, is the mean over the targets that count.
        """
        self._newest, own, numbers = self._ahead.of(step)
        return self._batches(self._newest, own, numbers=numbers)

    def digest(self) -> int:
        """Return a digest that identifies the samples of the newest step (`samples_digest`)."""
        return samples_digest(self._newest)

    @property
    def validation_micro_batches(self) -> int:
        """Number of micro-batches of each replica in one validation; 0 if no samples are held out."""
        return -(-len(self._validated) // (self._config.train.micro_batch * self._layout.sample_ranks))

    def of_validation(self) -> Batches:
        """Return the micro-batches of a validation; samples that only fill micro-batches do not count."""
        assert self._validation is not None
        ids, sets = self._filled()
        return self._batches(ids, self._tokens(self._validation, ids, (sets >= 0).astype(float)))

    def sums_by_set(self, batches: Batches, losses: Mapping[int, torch.Tensor]) -> tuple[float, ...]:
        """Return the sums of a validation's token losses by set. ``batches``: those of the validation.
        ``losses``: T losses by micro-batch."""
        assert self._validation is not None
        _, sets = self._filled()
        by_batch = torch.from_numpy(sets).reshape(-1, self._config.train.micro_batch)
        sums = [0.0] * len(self._validation.names)
        for micro_batch, loss_T in losses.items():
            batch = batches[micro_batch]
            weights_T = batch.weights if batch is not None else None
            weights_T = torch.ones_like(loss_T) if weights_T is None else weights_T
            sets_T = by_batch[micro_batch].repeat_interleave(len(loss_T) // by_batch.shape[1])
            for number in range(len(sums)):
                counted_T = (sets_T == number).to(loss_T.device) & (weights_T != 0)
                sums[number] += float((loss_T[counted_T] * weights_T[counted_T]).sum())
        return tuple(sums)

    def _filled(self) -> tuple[np.ndarray, np.ndarray]:
        """Return this replica's samples of a validation, and the place of each one's set among the sets'
        names, -1 for a sample that only fills a micro-batch."""
        assert self._validation is not None
        filled = self.validation_micro_batches * self._config.train.micro_batch * self._layout.sample_ranks
        sets = np.full(filled, -1)
        sets[: len(self._validated)] = self._validation.sets_of(self._validated)
        return self._mine(np.resize(self._validated, filled)), self._mine(sets)

    def documents(self) -> list[Mapping[str, Documents]]:
        ids, own, _ = self._read(0)
        return [{} if batch is None else batch.documents for batch in self._batches(ids, own)]

    def facts(self) -> dict[str, Any]:
        """Return the data's fingerprint, and the tokens and bytes of text that a validation predicts."""
        facts: dict[str, Any] = {"fingerprint": self._train.fingerprint}
        if self._validation is not None:
            ids, names = self._validated, self._validation.names
            targets, sets = self._validation.tokens_at(ids)[:, 1:], self._validation.sets_of(ids)
            if (masks := self._validation.masks_at(ids)) is not None:
                targets = targets[masks]
            facts["validation_tokens"] = max(1, targets.size)
            facts["validation_bytes"] = self._validation.bytes_of(targets)
            counts = np.bincount(sets, self._validation.counts_at(ids), len(names)).astype(int).tolist()
            by_set = {name: max(1, count) for name, count in zip(names, counts, strict=True)}
            facts["validation_tokens_by_set"] = by_set
        return facts

    def close(self) -> None:
        self._ahead.close()

    def _mine(self, ids: np.ndarray) -> np.ndarray:
        """Return this replica's samples of a global batch: every dp-th micro-batch.

        So the micro-batches that ranks of ep process at the same time, whose rows an expert multiplies in one
        product, are adjacent in the batch, and are the same for any dp.
        """
        turns = ids.reshape(-1, self._layout.sample_ranks, self._config.train.micro_batch)
        return turns[:, self._replica].flatten()

    def _read(self, step: int) -> tuple[np.ndarray, _Own, torch.Tensor | None]:
        seed, batch = self._config.train.seed, self._config.train.global_batch
        everywhere = self._train.order(seed, step * batch, batch)
        ids, counted = self._mine(everywhere), int(self._train.counts_at(everywhere).sum())
        weights = np.full(len(ids), batch * self._train.sequence / max(1, counted))
        own = self._tokens(self._train, ids, weights)
        return ids, own, self._numbers(step * batch, own) if self._config.train.dropout else None

    def _numbers(self, start: int, own: _Own) -> torch.Tensor:
        """Return the numbers of this rank's tokens, M x t, in a step whose first sample has the place
        ``start`` in the order of samples."""
        train, sequence = self._config.train, self._train.sequence
        places_N = torch.from_numpy(self._mine(np.arange(start, start + train.global_batch)))
        orders = [order for documents in (own[2] if own else []) for order in documents.orders]
        orders = orders or [causal_order(self._layout.cp, self._context, sequence)]
        own_Ns = torch.tensor([order.own for order in orders])
        places_MT = (places_N[:, None] * sequence + own_Ns).view(len(places_N) // train.micro_batch, -1)
        numbers_Mt = token_numbers(train.seed, places_MT.chunk(self._layout.tp, dim=1)[self._place.on("tp")])
        return numbers_Mt.pin_memory() if self._device.type == "cuda" else numbers_Mt

    def _tokens(self, shards: Mixture, ids: np.ndarray, weights_N: np.ndarray) -> _Own:
        """Read this rank's tokens of the given samples, into pinned host memory if a GPU will copy them.

        ``weights_N``: the weight of the loss of each sample's targets that count.
        """
        if not self._sees_tokens:
            return None
        windows_NS = torch.from_numpy(shards.tokens_at(ids))
        orders = self._orders(shards, ids)
        own_Ns = torch.tensor([order.own for order in orders])
        tokens_2Ns = torch.stack([windows_NS.gather(1, own_Ns), windows_NS.gather(1, own_Ns + 1)])
        weights_Ns = self._weights(shards.masks_at(ids), weights_N, own_Ns)
        if self._device.type == "cuda":
            tokens_2Ns = tokens_2Ns.pin_memory()
            weights_Ns = weights_Ns if weights_Ns is None else weights_Ns.pin_memory()
        restart, each = self._config.data.restart_positions, self._config.train.micro_batch
        masked = orders if self._config.data.document_mask else []
        batches = (masked[begin : begin + each] for begin in range(0, len(masked), each))
        return tokens_2Ns, weights_Ns, [documents_of(batch, restart=restart) for batch in batches]

    def _weights(
        self, masks_Ns: np.ndarray | None, weights_N: np.ndarray, own_Ns: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the weights of the losses of this rank's targets; None if all are 1."""
        if masks_Ns is None and (weights_N == 1).all():
            return None
        dtype = torch.float64 if self._config.train.dtype == "fp64" else torch.float32
        weights_N1 = torch.from_numpy(weights_N).to(dtype).unsqueeze(1)
        if masks_Ns is None:
            return weights_N1.expand(own_Ns.shape).contiguous()
        return (weights_N1 * torch.from_numpy(masks_Ns)).gather(1, own_Ns)

    def _orders(self, shards: Mixture, ids: np.ndarray) -> list[TokenOrder]:
        """Return, for every sample, which tokens this rank has."""
        sequence, ranks = shards.sequence, self._layout.cp
        if not self._config.data.document_mask:
            return [causal_order(ranks, self._context, sequence)] * len(ids)
        orders = []
        for number, begins_s in enumerate(shards.begins_at(ids)):
            documents = [0, *np.flatnonzero(begins_s).tolist()]
            place = number % self._config.train.micro_batch
            orders.append(document_order(ranks, self._context, sequence, documents, place))
        return orders

    def _batches(self, ids: np.ndarray, own: _Own, numbers: torch.Tensor | None = None) -> Batches:
        """Split samples into micro-batches on the device. ``numbers``: of this rank's tokens, for dropout."""
        count = len(ids) // self._config.train.micro_batch
        numbers_M: Sequence[torch.Tensor | None] = [None] * count
        if numbers is not None:
            numbers_M = numbers.to(self._device, non_blocking=True).unbind()
        if own is None:
            return [one if one is None else MicroBatch(None, None, token_numbers=one) for one in numbers_M]
        tokens_2Ns, weights_Ns, of_documents = own
        inputs_MT, targets_MT = tokens_2Ns.to(self._device, non_blocking=True).reshape(2, count, -1)
        documents = [_by_degree(one.on(self._device), self._layout, self._place) for one in of_documents]
        documents = documents or [{}] * count
        weights_MT: Sequence[torch.Tensor | None] = [None] * count
        if weights_Ns is not None:
            weights_MT = weights_Ns.to(self._device, non_blocking=True).reshape(count, -1).unbind()
        columns = (inputs_MT, targets_MT, documents, weights_MT, numbers_M)
        return [MicroBatch(*one) for one in zip(*columns, strict=True)]


def documents_to_measure(
    samples: ReplicaSamples | None, config: Config, context: ModuleContext
) -> list[Mapping[str, Documents]]:
    """Return `MicroBatch.documents` of the first step; without data, those of samples of one document each.

    If tokens attend to their whole sample, the mappings or the list are empty.
    """
    shape, place, layout = context.shape, context.place, config.layout()
    if samples is not None or not shape.documents:
        return [] if samples is None else samples.documents()
    numbers = range(config.train.micro_batch)
    orders = [document_order(layout.cp, place.on("cp"), shape.sequence, [0], number) for number in numbers]
    return [_by_degree(documents_of(orders, restart=False).on(context.device), layout, place)]


def _by_degree(documents: Documents, layout: ParallelLayout, place: Place) -> dict[str, Documents]:
    """Return documents by input name: of the micro-batch, and of the part of its samples that this rank's
    group processes in layers with their own tp degree."""
    found = {documents_seen(): documents}
    for degree in layout.own_degrees:
        groups = layout.tp // degree
        found[documents_seen(degree)] = documents.part(place.on(beyond(degree)), groups)
    return found
