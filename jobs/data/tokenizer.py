"""Converts text to token ids: raw bytes, or any Hugging Face `tokenizer.json`; finds the token that ends
documents.

The configuration names that token, or the files beside ``tokenizer.json`` do, or the tokenizer has exactly
one token with a name known for this. Nothing else is guessed: models learn from it where texts stop.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from braid.actors.config import Config, ConfigError
from braid.actors.config.paths import BYTES
from braid.jobs.output import listed

KEY: Final = "data.end_token"
TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
GENERATION: Final = "generation_config.json"
BESIDE: Final = (TOKENIZER_CONFIG, SPECIAL_TOKENS, GENERATION, "config.json")
"""Files that may name the end token, the tokenizer's own first: chat models have further end tokens."""
TOKENIZER_PARTS: Final = (
    *(TOKENIZER_CONFIG, SPECIAL_TOKENS, "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json"),
)
"""Files of a tokenizer beside `TOKENIZER_FILE`."""
_NAMES: Final = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|eos|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 - DeepSeek's
)
_RULES: Final = "2: text makes no special token"
"""Version of the rules by which ids are derived from the library's output; part of a tokenizer's
fingerprint."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """A text's token ids (1-d, unsigned integers), and counts of what they do not represent."""

    ids: np.ndarray
    lost: int = 0
    """Characters, apart from white space, that no token represents."""
    unknown: int = 0
    """Number of tokens that only mark something unknown."""


class Tokenizer:
    """A tokenizer from `tokenizer.json`; its own special tokens, padding and truncation are switched off.

    ``end`` names the token that ends documents; by default the files beside ``path`` name it. Ids are below
    ``vocabulary``. Text that spells a special token is encoded as plain text, so that it never becomes
    ``end_of_document``, the id of ``end_token``.
    """

    def __init__(self, path: Path, end: str | None = None) -> None:
        from tokenizers import Tokenizer as Backend  # imported here, so that the bytes tokenizer starts fast

        try:
            content = path.read_bytes()
        except OSError as fault:
            raise ValueError(
                f"data.tokenizer: cannot read {str(path)!r} ({fault.strerror}); give {BYTES!r}, the path "
                "of a tokenizer.json, or a name on the Hub as org/name"
            ) from None
        try:
            self.backend: Any = Backend.from_buffer(content)
        except Exception as fault:  # the library raises bare Exceptions
            raise ValueError(
                f"data.tokenizer: {str(path)!r} is not a Hugging Face tokenizer.json ({fault}); save one "
                f"with `tokenizer.save(path)`, or give {BYTES!r}"
            ) from None
        ids = self.backend.get_vocab(with_added_tokens=True)
        if not ids:
            raise ValueError(f"data.tokenizer: {str(path)!r} has an empty vocabulary; train it first")
        added = self.backend.get_added_tokens_decoder().values()
        marked = [token.content for token in added if token.special]
        self.name = str(path)
        self.end_token = _end_token(path, ids, marked, end)
        self.end_of_document = ids[self.end_token]
        self.vocabulary = max(ids.values()) + 1  # ids may have gaps: the number of entries may be too small
        model = json.loads(content)["model"]
        unknown = model.get("unk_id")
        self._unknown = ids.get(model.get("unk_token") or "", -1) if unknown is None else int(unknown)
        """Id of the unknown token; -1 if there is none."""
        names = {self.end_token, *marked, *special_names(path.parent).values()}
        special = {ids[name] for name in names if name in ids}
        forbidden = sorted(special - ({self._unknown} - {self.end_of_document}))
        self.special = frozenset(forbidden)
        """Ids of the special tokens, which plain text never becomes."""
        self._special = np.array(forbidden)
        self._lost: dict[str, bool] = {}
        rules = f"{_RULES} {self.end_of_document} {forbidden} ".encode()
        self.fingerprint = hashlib.sha256(rules + content).hexdigest()
        self.backend.no_padding()
        self.backend.no_truncation()
        self.backend.add_special_tokens([self.end_token])  # it may have been added as a normal token
        self.backend.encode_special_tokens = True

    @property
    def token_bytes(self) -> tuple[int, ...]:
        """Number of UTF-8 bytes of text for every id below ``vocabulary``, 0 for special tokens."""
        content = json.loads(self.backend.to_str())
        counts = [0] * self.vocabulary
        pieces = self.backend.get_vocab(with_added_tokens=False)
        parts = [content[part] for part in ("normalizer", "pre_tokenizer", "decoder")]
        if '"ByteLevel"' in json.dumps(parts):
            for piece, id in pieces.items():
                counts[id] = len(piece)  # a character for every byte
        else:  # decoded after another token: alone, a word's first token loses the space before it
            before = self._ids(["a"])[-1:].tolist()
            alone = self._bytes_of(before)
            for piece, id in pieces.items():
                is_byte = re.fullmatch(r"<0x[0-9A-F]{2}>", piece)
                counts[id] = 1 if is_byte else max(0, self._bytes_of([*before, id]) - alone)
        for token in content["added_tokens"]:
            counts[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        return tuple(counts)

    def _bytes_of(self, ids: list[int]) -> int:
        return len(self.backend.decode(ids, skip_special_tokens=False).encode())

    def encode(self, text: str) -> Encoded:
        """Encode ``text`` without producing any special token."""
        ids = self._ids([text])
        if np.isin(ids, self._special).any():
            # the vocabulary itself has a special token's characters as a word, or as part of one
            ids = self._ids(self._cut(text))
            ids = ids[~np.isin(ids, self._special)]
        counts = Counter(text)
        lost = sum(count for letter, count in counts.items() if self._is_lost(letter))
        return Encoded(ids, lost=lost, unknown=int(np.count_nonzero(ids == self._unknown)))

    def encode_rendered(self, text: str) -> tuple[Encoded, np.ndarray]:
        """Encode text in which names of special tokens are the tokens, as `transformers` does.

        Return also the begin and end of every token in the text, in characters: [N, 2].
        """
        self.backend.encode_special_tokens = False
        try:
            (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)
        finally:
            self.backend.encode_special_tokens = True
        ids = np.array(encoding.ids, np.int64)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return Encoded(ids, unknown=int(np.count_nonzero(ids == self._unknown))), spans

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def _ids(self, texts: list[str]) -> np.ndarray:
        # this call computes no offsets, and uses no threads for one text
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return np.concatenate([np.array(encoding.ids, dtype=np.uint32) for encoding in encodings])

    def _is_lost(self, letter: str) -> bool:
        """Return whether a character alone yields no token, or only special tokens; white space never counts
        as lost."""
        if (known := self._lost.get(letter)) is None:
            makes = np.setdiff1d(self._ids([letter]), self._special).size
            self._lost[letter] = known = not letter.isspace() and not makes
        return known

    def _cut(self, text: str) -> list[str]:
        """Cut a text into parts, none of which yields a special token of several characters."""
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)
        made = np.isin(np.array(encoding.ids), self._special).tolist()
        spans = [span for span, special in zip(encoding.offsets, made, strict=True) if special]
        inside = sorted({(start + stop) // 2 for start, stop in spans if stop - start > 1})
        if not inside:
            return [text]
        edges = pairwise([0, *inside, len(text)])
        return [part for start, stop in edges for part in self._cut(text[start:stop])]


class BytesTokenizer(Tokenizer):
    """Tokenizer whose ids 0 ... 255 are the bytes of the text's UTF-8; 256 ends a document."""

    name = BYTES
    fingerprint = hashlib.sha256(b"braid bytes tokenizer 1").hexdigest()
    vocabulary = 257
    end_of_document = 256
    special = frozenset((256,))
    token_bytes = (*[1] * 256, 0)
    end_token = "<|endoftext|>"
    _unknown = -1

    def __init__(self) -> None:
        pass

    @cached_property
    def backend(self) -> Any:
        """The same tokenizer of the library, which encodes plain text more slowly."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        # the letter for each byte: printable bytes keep their own character
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = count(256)
        letters = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
        backend: Any = Backend(models.BPE(letters, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(self.end_token, special=True)])
        return backend

    def encode(self, text: str) -> Encoded:
        return Encoded(np.frombuffer(text.encode(), dtype=np.uint8))


def load_tokenizer(name: str, end: str | None = None) -> Tokenizer:
    """Load 'bytes', or the tokenizer.json at a path or in that folder; ``end``: see `Tokenizer`."""
    if name == BYTES:
        if end is not None:
            raise ValueError(
                f"{KEY}: {end!r} does not go with data.tokenizer={BYTES}, which has an end of its own; leave "
                f"{KEY} out"
            )
        return BytesTokenizer()
    path = Path(name).absolute()
    return Tokenizer(path / TOKENIZER_FILE if path.is_dir() else path, end)


def tokenizer_of(config: Config) -> Tokenizer:
    """Load the tokenizer that a configuration names, or that of its ``model.initial``."""
    initial = config.model.initial
    if config.data.tokenizer is None and initial is not None:
        config.shape(0)  # errors in the weights are reported first
        if not (initial / TOKENIZER_FILE).is_file():
            raise ConfigError(
                f"data.tokenizer: model.initial={str(initial)!r} has no {TOKENIZER_FILE}, and other tokens "
                f"mean nothing to its weights; save it there with `AutoTokenizer.from_pretrained(...)"
                f".save_pretrained(...)`, or set data.tokenizer"
            )
    return load_tokenizer(config.tokenizer, config.data.end_token)


# Find the token that ends documents.


def _end_token(path: Path, ids: Mapping[str, int], special: list[str], wanted: str | None) -> str:
    """Return the name of the token that ends documents in the tokenizer at ``path``.

    ``ids``: all tokens by name; ``special``: names of tokens marked as special; ``wanted``: the
    configuration's choice.
    """
    names = {number: name for name, number in ids.items()}
    token, origin = wanted, "the configuration"
    for file in BESIDE:
        ends = _ends(content_of(path.parent / file), names) if token is None else []
        if len(ends) == 1:
            token, origin = ends[0], str(path.parent / file)
    if token is not None:
        if token in ids:
            return str(token)
        why, choices = f"{origin} names {token!r}, which is no token of {str(path)!r}", special
    else:
        choices = [name for name in _NAMES if name in ids]
        if len(choices) == 1:
            return choices[0]
        why, choices = f"no file beside {str(path)!r} says which token ends a document", choices or special
    such = listed([repr(name) for name in choices if name in ids]) or (
        "'<|endoftext|>' after adding it with `tokenizer.add_special_tokens(['<|endoftext|>'])`"
    )
    raise ValueError(f"{KEY}: {why}; set it to one, such as {such}")


def special_names(folder: Path) -> dict[str, str]:
    """Return the tokens to which a tokenizer's files assign a role (``bos_token``, ...), by role."""
    content = {**content_of(folder / SPECIAL_TOKENS), **content_of(folder / TOKENIZER_CONFIG)}
    return {key: name for key, value in content.items() if key.endswith("_token") if (name := _name(value))}


def _ends(content: Mapping[str, Any], names: Mapping[int, str]) -> list[Any]:
    """Return the end tokens that a file names: names, or the id of a token without a name."""
    if name := _name(content.get("eos_token")):
        return [name]
    told = content.get("eos_token_id")
    numbers = told if isinstance(told, list) else [told]
    return [names.get(number, number) for number in numbers if type(number) is int]


def _name(token: Any) -> str | None:
    """Return the name of a token, which a file gives as a text or as an object with the text as
    ``content``."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def content_of(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; return an empty dict if there is no file, or it holds no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
