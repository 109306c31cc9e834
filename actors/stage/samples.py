"""A rank's samples: those of its data-parallel replica, as micro-batches on its device.

Shape suffixes: N samples, S = sequence + 1 tokens of a window, of which this rank has s and their successors
(2), M micro-batches, T tokens of a micro-batch.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch

from braid.actors.config import Config
from braid.actors.stage.data import TRAIN, VALIDATION, TokenShards, read_index, sample_ids, samples_digest
from braid.actors.stage.executor import MicroBatch
from braid.actors.stage.reading_ahead import ReadingAhead
from braid.scheduling.spec import ParallelLayout

Batches = list[MicroBatch | None]
"""One for each micro-batch; None on a rank that has no part of the model that sees tokens."""


def validation_micro_batches(config: Config) -> int:
    """Micro-batches per replica in one validation, rounded up to whole ones."""
    return -(-config.train.validation_samples // (config.train.micro_batch * config.layout().dp))


class ReplicaSamples:
    """Training samples by step, read one step ahead, and those of a validation."""

    def __init__(
        self,
        directory: Path,
        config: Config,
        sequence: int,
        layout: ParallelLayout,
        replica: int,
        own: Sequence[int],
        chunks: Collection[int],
        device: torch.device,
    ) -> None:
        """``replica``: the rank's place along the data-parallel axis. ``own``: places in a sample of the
        tokens that the rank has. ``chunks``: of the model, on the rank.

        `ValueError` as `TokenShards.open`.
        """
        self._config, self._layout, self._replica, self._device = config, layout, replica, device
        index = read_index(directory)
        self._train = TokenShards.open(directory, TRAIN, sequence, index)
        validates = config.data.validation_fraction > 0
        self._validation = TokenShards.open(directory, VALIDATION, sequence, index) if validates else None
        self._sees_tokens = any(layout.is_first(chunk) or layout.is_last(chunk) for chunk in chunks)
        self._own = slice(None) if len(own) == sequence else torch.tensor(own)
        self._ahead = ReadingAhead(self._read)
        self._newest = np.zeros(0, np.int64)

    def of_step(self, step: int) -> Batches:
        """Of a training step (from 0); those of the next one are read meanwhile."""
        self._newest, own_2Ns = self._ahead.of(step)
        return self._batches(self._newest, own_2Ns)

    def digest(self) -> int:
        """Tells the samples of the step that was asked for last from others (`samples_digest`)."""
        return samples_digest(self._newest)

    def of_validation(self) -> Batches:
        """The samples that every validation takes."""
        assert self._validation is not None
        count = validation_micro_batches(self._config) * self._config.train.micro_batch * self._layout.dp
        ids = self._mine(np.arange(count) % self._validation.samples)
        return self._batches(ids, self._tokens(self._validation, ids))

    def facts(self) -> dict[str, float | int | str]:
        """Size and identity of the data, for reports and checkpoints."""
        facts: dict[str, float | int | str] = {
            "fingerprint": self._train.fingerprint,
            "train_tokens": self._train.tokens,
            "train_samples": self._train.samples,
        }
        if self._validation is not None:
            facts["validation_bytes_per_token"] = self._validation.bytes_per_token
        return facts

    def close(self) -> None:
        """Read no more."""
        self._ahead.close()

    def _mine(self, ids: np.ndarray) -> np.ndarray:
        """The contiguous part of a global batch that belongs to this replica."""
        return np.split(ids, self._layout.dp)[self._replica]

    def _read(self, step: int) -> tuple[np.ndarray, torch.Tensor | None]:
        train = self._config.train
        batch = train.global_batch
        ids = self._mine(sample_ids(train.seed, self._train.samples, step * batch, batch))
        return ids, self._tokens(self._train, ids)

    def _tokens(self, shards: TokenShards, ids: np.ndarray) -> torch.Tensor | None:
        """This rank's tokens of samples and their successors, on the host, in memory that a GPU can copy from
        by itself."""
        if not self._sees_tokens:
            return None
        tokens_NS = torch.from_numpy(shards.tokens_at(ids))
        own_2Ns = torch.stack([tokens_NS[:, :-1][:, self._own], tokens_NS[:, 1:][:, self._own]])
        return own_2Ns.pin_memory() if self._device.type == "cuda" else own_2Ns

    def _batches(self, ids: np.ndarray, own_2Ns: torch.Tensor | None) -> Batches:
        count = len(ids) // self._config.train.micro_batch
        if own_2Ns is None:
            return [None] * count
        own_2Ns = own_2Ns.to(self._device, non_blocking=True)
        inputs_MT, targets_MT = (tokens_Ns.reshape(count, -1) for tokens_Ns in own_2Ns)
        return [MicroBatch(inputs_MT[m], targets_MT[m]) for m in range(count)]
