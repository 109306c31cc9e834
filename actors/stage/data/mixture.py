"""The data of a run, one prepared data set or a mixture of several: one numbering and one order for all
samples.

`braid.jobs.data.data_sets` writes `MIXTURE_FILE`, which names the sets' folders and weights. Every set has
exactly its share of every `BLOCK` positions, and its samples come in epochs of their own.

Shape suffixes: N samples, S = sequence + 1 tokens of a window, K sets.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ConfigDict

from braid.actors.stage.data.sample_order import sample_ids, sample_ids_at
from braid.actors.stage.data.token_files import TRAIN, VALIDATION, TokenShards, read_description, read_index

MIXTURE_FILE = "mixture.json"
MIXTURE_FORMAT = "braid-mixture"
MIXTURE_VERSION = 1
_AGAIN = "start the run again"
BLOCK = 2**16
"""Number of positions in which every set has exactly its share."""


@dataclass(frozen=True)
class MixedSet:
    """A set of a mixture: its name, the folder of its tokens, and its weight."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    directory: str
    weight: float


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide ``total`` by weights into whole numbers of at least 1, by largest remainders.

    The result adds up to ``total``, or to the number of weights if that is larger.
    """
    whole = sum(map(Fraction, weights))
    exact = [Fraction(weight) / whole * total for weight in weights]
    found = [max(1, int(quota)) for quota in exact]
    while (missing := max(total, len(found)) - sum(found)) != 0:
        change = 1 if missing > 0 else -1
        able = (place for place, count in enumerate(found) if count + change >= 1)
        best = max(able, key=lambda place: change * (exact[place] - found[place]))
        found[best] += change
    return found


def write_mixture(sets: Sequence[MixedSet]) -> str:
    """Return the text of `MIXTURE_FILE`; `read_mixture` is the inverse."""
    content = {"format": MIXTURE_FORMAT, "version": MIXTURE_VERSION, "sets": [vars(one) for one in sets]}
    return json.dumps(content, indent=1)


def read_mixture(directory: Path) -> tuple[MixedSet, ...]:
    """Read the sets of a mixture; raise as `read_description` does."""
    path, kind = directory / MIXTURE_FILE, dict[Literal["sets"], tuple[MixedSet, ...]]
    entries = read_description(path, MIXTURE_FORMAT, MIXTURE_VERSION, kind, _AGAIN)
    sets: tuple[MixedSet, ...] = entries.get("sets", ())
    if not sets:
        raise ValueError(f"data set {directory}: {MIXTURE_FILE} names no set; {_AGAIN}")
    return sets


@dataclass(frozen=True, eq=False, kw_only=True)
class Mixture:
    """One split of a run's data sets, whose samples are numbered through."""

    names: tuple[str, ...]
    """Names of the sets; data that are no mixture are one set with the name ""."""
    weights: tuple[float, ...]
    sets: tuple[TokenShards, ...]

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides a run's samples, besides seed and batch: names, shares and tokens of the
        sets; without a mixture, of the tokens alone."""
        if self.names == ("",):
            return self.sets[0].index.fingerprint
        parts = zip(self.names, shares(self.weights, BLOCK), self.sets, strict=True)
        content = [MIXTURE_VERSION, [[name, share, one.index.fingerprint] for name, share, one in parts]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def sequence(self) -> int:
        return self.sets[0].sequence

    @property
    def starts(self) -> np.ndarray:
        """The number of each set's first sample, then the number of all samples: [K + 1] int64."""
        return np.cumsum([0, *(one.samples for one in self.sets)], dtype=np.int64)

    @property
    def samples(self) -> int:
        return int(self.starts[-1])

    def order(self, seed: int, start: int, count: int) -> np.ndarray:
        """Return the samples at the global positions start ... start + count - 1: [count] int64.

        In every block of `BLOCK` positions a permutation of the block's places decides: a set has as many
        places as its share, and they are the set's own next positions, of which every epoch has another
        permutation of the set's samples. Without a mixture every epoch is a permutation of all samples.
        """
        if self.names == ("",):
            return sample_ids(seed, self.samples, start, count)
        bounds = np.cumsum([0, *shares(self.weights, BLOCK)], dtype=np.int64)
        blocks_N = np.arange(start, start + count, dtype=np.int64) // BLOCK
        places_N = sample_ids(seed, BLOCK, start, count)
        sets_N, ids_N = np.searchsorted(bounds, places_N, side="right") - 1, np.empty_like(places_N)
        for k, first in enumerate(self.starts[:-1]):
            of_set = sets_N == k
            positions = blocks_N[of_set] * (bounds[k + 1] - bounds[k]) + places_N[of_set] - bounds[k]
            own_seed = seed_of_set(seed, self.names[k])
            ids_N[of_set] = first + sample_ids_at(own_seed, self.sets[k].samples, positions)
        return ids_N

    def spread(self, most: int) -> np.ndarray:
        """Return ids of about ``most`` different samples, divided over the sets by their weights, at equal
        distances in each set: [count] int64."""
        counts = shares(self.weights, most)
        parts = zip(self.sets, counts, self.starts[:-1], strict=True)
        return np.concatenate([one.spread(count) + first for one, count, first in parts])

    def sets_of(self, ids_N: np.ndarray) -> np.ndarray:
        """Return the place in ``names`` of each sample's set: [N] -> [N] int64."""
        return np.searchsorted(self.starts, ids_N, side="right") - 1

    def tokens_at(self, ids_N: np.ndarray) -> np.ndarray:
        """Return the windows of samples: [N] integers -> [N, S] int64. Raise IndexError if an id is too
        large."""
        return self._by_set(ids_N, TokenShards.tokens_at)

    def masks_at(self, ids_N: np.ndarray) -> np.ndarray | None:
        """Return whether the losses of samples' targets count: [N] integers -> [N, sequence] bool; None: all
        count."""
        if all(one.counts is None for one in self.sets):
            return None

        def masks(one: TokenShards, ids: np.ndarray) -> np.ndarray:
            found = one.masks_at(ids)
            return np.ones((len(ids), one.sequence), bool) if found is None else found

        return self._by_set(ids_N, masks)

    def counts_at(self, ids_N: np.ndarray) -> np.ndarray:
        """Return the number of targets of samples that count: [N] integers -> [N] int64."""
        return self._by_set(ids_N, TokenShards.counts_at)

    def begins_at(self, ids_N: np.ndarray) -> np.ndarray:
        """Return where documents begin in samples: [N] integers -> [N, sequence] bool."""
        return self._by_set(ids_N, TokenShards.begins_at)

    def bytes_of(self, tokens: np.ndarray) -> int | None:
        """Return the UTF-8 bytes of the text that tokens stand for; None if a set does not know them."""
        found = [one.index.bytes_of(tokens) for one in self.sets]
        return None if None in found else found[0]

    def _by_set(self, ids_N: np.ndarray, read: Callable[[TokenShards, np.ndarray], np.ndarray]) -> np.ndarray:
        """Return for each sample the row that ``read`` finds in its set, which gets the set's own ids."""
        if len(ids_N) and not 0 <= ids_N.min() <= ids_N.max() < self.samples:
            raise IndexError(f"samples {ids_N.min()} to {ids_N.max()} of {self.samples}")
        sets_N = self.sets_of(ids_N)
        rows = [read(one, ids_N[sets_N == k] - self.starts[k]) for k, one in enumerate(self.sets)]
        found = np.empty((len(ids_N), *rows[0].shape[1:]), rows[0].dtype)
        for k, of_set in enumerate(rows):
            found[sets_N == k] = of_set
        return found


def seed_of_set(seed: int, name: str) -> int:
    """Return the seed of the order of one set's samples."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "big")


def open_splits(
    directory: Path | str, sequence: int, validated: Collection[str] = ()
) -> tuple[Mixture, Mixture | None]:
    """Open a prepared data set, or a mixture of them, for training and for validation.

    ``validated``: names of the sets with a validation split, "" for data that are no mixture; without a name
    there is no validation. Raise `ValueError` or `UnreadableError` as `read_index`, `read_mixture` and
    `TokenShards.open` do, and `ValueError` if the sets have different tokenizers.
    """
    directory = Path(directory)
    if not (directory / MIXTURE_FILE).exists():
        index = read_index(directory)
        splits = (TRAIN, VALIDATION) if validated else (TRAIN,)
        train, *validation = (
            Mixture(names=("",), weights=(1.0,), sets=(TokenShards.open(directory, split, sequence, index),))
            for split in splits
        )
        return train, validation[0] if validation else None
    sets = read_mixture(directory)
    indices = {one.name: read_index(Path(one.directory)) for one in sets}
    tokenizers = {index.tokenizer_fingerprint: name for name, index in indices.items()}
    if len(tokenizers) > 1:
        names = " and ".join(map(repr, tokenizers.values()))
        raise ValueError(f"data set {directory}: {names} have different tokenizers; {_AGAIN}")

    def mixture(split: str, chosen: Sequence[MixedSet]) -> Mixture:
        opened = []
        for one in chosen:
            try:
                opened.append(TokenShards.open(one.directory, split, sequence, indices[one.name]))
            except ValueError as fault:
                raise ValueError(f"data.mixture, set {one.name!r}: {fault}") from None
        names, weights = tuple(one.name for one in chosen), tuple(one.weight for one in chosen)
        return Mixture(names=names, weights=weights, sets=tuple(opened))

    held_out = [one for one in sets if one.name in validated]
    return mixture(TRAIN, sets), mixture(VALIDATION, held_out) if held_out else None
