"""The order of samples: a permutation for every epoch, computed from the seed alone.

Shape suffixes: N samples, R rounds of the permutation.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 24  # four mix large sets; the orders of five samples need so many to be equally likely


def sample_ids(seed: int, samples: int, start: int, count: int) -> np.ndarray:
    """Return the sample ids at the global positions start ... start + count - 1: [count] int64.

    Position n is place n % samples of epoch n // samples, and every epoch is another permutation of [0,
    samples): a pure function of (seed, n, samples), whatever the number of ranks. Position step *
    global_batch + i is sample i of a step. Needs memory for ``count`` numbers only.
    """
    return sample_ids_at(seed, samples, np.arange(start, start + count, dtype=np.int64))


def sample_ids_at(seed: int, samples: int, positions_N: np.ndarray) -> np.ndarray:
    """Return the sample ids at any positions: [N] int64 -> [N] int64, as `sample_ids` has them there."""
    epochs_N, places_N = np.divmod(positions_N.astype(np.uint64), np.uint64(samples))
    return _permute(_round_keys(seed, epochs_N), places_N, samples)


def samples_digest(ids: np.ndarray) -> int:
    """Return a number of a multiset of samples; numbers of parts add up to the whole's, modulo 2^64."""
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return int(mixed.sum(dtype=np.uint64))


def _permute(keys_RN: np.ndarray, places_N: np.ndarray, samples: int) -> np.ndarray:
    """Permute [0, samples) by a Feistel network on the next power of two, applied again to values outside."""
    bits = (samples - 1).bit_length()
    ids_N = _feistel(keys_RN, places_N, bits)
    outside = np.flatnonzero(ids_N >= samples)
    while len(outside):
        ids_N[outside] = _feistel(keys_RN[:, outside], ids_N[outside], bits)
        outside = outside[ids_N[outside] >= samples]
    return ids_N.astype(np.int64)


def _feistel(keys_RN: np.ndarray, values_N: np.ndarray, bits: int) -> np.ndarray:
    """Compute a bijection of [0, 2**bits): the high and the low half are hashed into each other in turn."""
    low_bits = np.uint64((bits + 1) // 2)
    low_mask = np.uint64(2 ** ((bits + 1) // 2) - 1)
    high_mask = np.uint64(2 ** (bits // 2) - 1)
    high_N, low_N = values_N >> low_bits, values_N & low_mask
    for number, key_N in enumerate(keys_RN):
        if number % 2:
            high_N = high_N ^ (_mix(low_N ^ key_N) & high_mask)
        else:
            low_N = low_N ^ (_mix(high_N ^ key_N) & low_mask)
    return (high_N << low_bits) | low_N


def _round_keys(seed: int, epochs_N: np.ndarray) -> np.ndarray:
    """Return the keys of all rounds: [N] epochs -> [rounds, N] uint64."""
    seed_1 = _mix(np.array([seed % 2**64], dtype=np.uint64))
    key_N = _mix(epochs_N + seed_1)  # not symmetric: seed 1 in epoch 2 is not seed 2 in epoch 1
    return np.stack([_mix(key_N + np.array([number], dtype=np.uint64)) for number in range(_ROUNDS)])


def _mix(values_N: np.ndarray) -> np.ndarray:
    """Apply splitmix64 (Steele, Lea and Flood 2014): uint64 -> uint64, a bijection that mixes all bits."""
    z_N = values_N + _GOLDEN
    z_N = (z_N ^ (z_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_N = (z_N ^ (z_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z_N ^ (z_N >> np.uint64(31))
