"""Samples of a rank's data-parallel replica, as micro-batches on the rank's device.

Shape suffixes: N samples, S = sequence + 1 tokens of a window, s tokens of a window that a rank has as inputs
(and their successors as targets), M micro-batches, T tokens of a micro-batch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from braid.actors.config import Config
from braid.actors.stage.data.mixture import TokenSource, open_splits
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
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import beyond
from braid.scheduling.text.pattern import documents_seen

Batches = list[MicroBatch | None]
"""One entry for each micro-batch; None on a rank whose part of the model reads no tokens."""


_Own = tuple[torch.Tensor, list[Documents]] | None
"""A rank's part of its replica's samples: tokens and their successors, 2 x N x s, and documents by
micro-batch if tokens attend only to their own document; None on a rank that reads no tokens.
"""
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
        """
        self._newest, own = self._ahead.of(step)
        return self._batches(self._newest, own)

    def digest(self) -> int:
        """Return a digest that identifies the samples of the newest step (`samples_digest`)."""
        return samples_digest(self._newest)

    @property
    def validation_micro_batches(self) -> int:
        """Number of micro-batches of each replica in one validation; 0 if no samples are held out."""
        return -(-len(self._validated) // (self._config.train.micro_batch * self._layout.sample_ranks))

    def of_validation(self) -> Batches:
        """Return the micro-batches of a validation; samples that are repeated to fill micro-batches do not
        count.
        """
        assert self._validation is not None
        ids, sets = self._filled()
        return self._batches(ids, self._tokens(self._validation, ids), sets >= 0)

    def sums_by_set(self, losses: Mapping[int, torch.Tensor]) -> tuple[float, ...]:
        """Return the sums of a validation's token losses by set. ``losses``: T losses by micro-batch."""
        assert self._validation is not None
        _, sets = self._filled()
        by_batch = torch.from_numpy(sets).reshape(-1, self._config.train.micro_batch)
        sums = [0.0] * len(self._validation.names)
        for micro_batch, loss_T in losses.items():
            sets_T = by_batch[micro_batch].repeat_interleave(len(loss_T) // by_batch.shape[1])
            for number in range(len(sums)):
                sums[number] += float(loss_T[(sets_T == number).to(loss_T.device)].sum())
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
        return [{} if batch is None else batch.documents for batch in self._batches(*self._read(0))]

    def facts(self) -> dict[str, Any]:
        """Return the data's fingerprint, and the number of tokens that a validation predicts, also by set,
        and of their text's bytes.
        """
        facts: dict[str, Any] = {"fingerprint": self._train.fingerprint}
        if self._validation is not None:
            targets, names = self._validation.tokens_at(self._validated)[:, 1:], self._validation.names
            facts["validation_tokens"] = targets.size
            facts["validation_bytes"] = self._validation.bytes_of(targets)
            samples = np.bincount(self._validation.sets_of(self._validated), minlength=len(names)).tolist()
            tokens = [count * targets.shape[1] for count in samples]
            facts["validation_tokens_by_set"] = dict(zip(names, tokens, strict=True))
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

    def _read(self, step: int) -> tuple[np.ndarray, _Own]:
        seed, batch = self._config.train.seed, self._config.train.global_batch
        ids = self._mine(self._train.order(seed, step * batch, batch))
        return ids, self._tokens(self._train, ids)

    def _tokens(self, shards: TokenSource, ids: np.ndarray) -> _Own:
        """Read this rank's tokens of the given samples, into pinned host memory if a GPU will copy them."""
        if not self._sees_tokens:
            return None
        windows_NS = torch.from_numpy(shards.tokens_at(ids))
        orders = self._orders(windows_NS[:, :-1], shards.end_of_document)
        own_Ns = torch.tensor([order.own for order in orders])
        tokens_2Ns = torch.stack([windows_NS.gather(1, own_Ns), windows_NS.gather(1, own_Ns + 1)])
        if self._device.type == "cuda":
            tokens_2Ns = tokens_2Ns.pin_memory()
        restart, each = self._config.data.restart_positions, self._config.train.micro_batch
        masked = orders if self._config.data.document_mask else []
        batches = (masked[begin : begin + each] for begin in range(0, len(masked), each))
        return tokens_2Ns, [documents_of(batch, restart=restart) for batch in batches]

    def _orders(self, inputs_Ns: torch.Tensor, end: int) -> list[TokenOrder]:
        """Return, for every sample, which tokens this rank has. ``end``: id of the token that ends a
        document.
        """
        sequence, ranks = inputs_Ns.shape[1], self._layout.cp
        if not self._config.data.document_mask:
            return [causal_order(ranks, self._context, sequence)] * len(inputs_Ns)
        orders = []
        for number, sample_s in enumerate(inputs_Ns):
            documents = [0, *((sample_s[:-1] == end).nonzero().flatten() + 1).tolist()]
            place = number % self._config.train.micro_batch
            orders.append(document_order(ranks, self._context, sequence, documents, place))
        return orders

    def _batches(self, ids: np.ndarray, own: _Own, counted: np.ndarray | None = None) -> Batches:
        """Split samples into micro-batches on the device. ``counted``: for each sample, whether its loss
        counts; None: all count.
        """
        count = len(ids) // self._config.train.micro_batch
        if own is None:
            return [None] * count
        tokens_2Ns, of_documents = own
        inputs_MT, targets_MT = tokens_2Ns.to(self._device, non_blocking=True).reshape(2, count, -1)
        documents = [_by_degree(one.on(self._device), self._layout, self._place) for one in of_documents]
        documents = documents or [{}] * count
        counted_MT: Sequence[torch.Tensor | None] = [None] * count
        if counted is not None:
            counted_Ns = torch.from_numpy(counted)[:, None].expand(tokens_2Ns.shape[1:]).to(self._device)
            counted_MT = counted_Ns.reshape(count, -1).unbind()
        return [MicroBatch(inputs_MT[m], targets_MT[m], documents[m], counted_MT[m]) for m in range(count)]


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
    group processes in layers with their own tp degree.
    """
    found = {documents_seen(): documents}
    for degree in layout.own_degrees:
        groups = layout.tp // degree
        found[documents_seen(degree)] = documents.part(place.on(beyond(degree)), groups)
    return found
