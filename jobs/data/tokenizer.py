"""Text to token ids: raw bytes, or any Hugging Face `tokenizer.json`."""

import hashlib
import json
import re
from pathlib import Path
from typing import Protocol

import numpy as np

from braid.actors.config.paths import BYTES

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


class Tokenizer(Protocol):
    """What preparation needs; ids are below ``vocabulary``, and text never becomes ``end_of_document``."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    @property
    def token_bytes(self) -> tuple[int, ...]:
        """UTF-8 bytes of text that every id below ``vocabulary`` stands for, 0 for special ones."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Token ids of ``text`` without any special token: [tokens], an unsigned integer dtype."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Text of ``ids``; ends of documents become nothing."""
        ...


class BytesTokenizer:
    """Ids 0 ... 255 are the bytes of the text's UTF-8, 256 ends a document."""

    name = BYTES
    fingerprint = hashlib.sha256(b"braid bytes tokenizer 1").hexdigest()
    vocabulary = 257
    end_of_document = 256
    token_bytes = (*[1] * 256, 0)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: np.ndarray) -> str:
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json`; its own special tokens, padding and truncation are switched off.

    A document ends with the first of `END_OF_DOCUMENT_NAMES` that the vocabulary has, else with a new id
    behind the vocabulary. Text that spells such a name out is encoded as the text that it is.

    Raises ValueError if the file cannot be read or is no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend  # here: the bytes tokenizer must start fast

        try:
            content = path.read_bytes()
        except OSError as fault:
            raise ValueError(
                f"data.tokenizer: cannot read {str(path)!r} ({fault.strerror}); give {BYTES!r} or the path "
                "of a tokenizer.json"
            ) from None
        try:
            self._backend = Backend.from_buffer(content)
        except Exception as fault:  # the library raises bare Exceptions
            raise ValueError(
                f"data.tokenizer: {str(path)!r} is not a Hugging Face tokenizer.json ({fault}); save one "
                f"with `tokenizer.save(path)`, or give {BYTES!r}"
            ) from None
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True
        ids = self._backend.get_vocab(with_added_tokens=True)
        if not ids:
            raise ValueError(f"data.tokenizer: {str(path)!r} has an empty vocabulary; train it first")
        known = next((ids[name] for name in END_OF_DOCUMENT_NAMES if name in ids), None)
        last = max(ids.values())  # ids may have gaps: the number of entries says too little
        self.name = str(path)
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.end_of_document = last + 1 if known is None else known
        self.vocabulary = max(last, self.end_of_document) + 1

    @property
    def token_bytes(self) -> tuple[int, ...]:
        content = json.loads(self._backend.to_str())
        found = dict.fromkeys(range(self.vocabulary), 0)
        pieces = {id: piece for piece, id in self._backend.get_vocab(with_added_tokens=False).items()}
        if '"ByteLevel"' in json.dumps(
            [content[part] for part in ("normalizer", "pre_tokenizer", "decoder")]
        ):
            found |= {id: len(piece) for id, piece in pieces.items()}  # a character for every byte
        else:  # decoded behind another one: alone, what begins a word loses the space in front of it
            before = self.encode("a")[-1:].tolist()
            alone = len(self._decode(before).encode())
            for id, piece in pieces.items():
                byte = re.fullmatch(r"<0x[0-9A-F]{2}>", piece)
                found[id] = 1 if byte else len(self._decode([*before, id]).encode()) - alone
        for token in content["added_tokens"]:
            found[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        return tuple(max(0, count) for count in found.values())

    def encode(self, text: str) -> np.ndarray:
        # a batch of one: `encode_batch_fast` leaves out the offsets, and uses no threads for one text
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: np.ndarray) -> str:
        return self._decode(ids[ids != self.end_of_document].tolist())

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of ``data.tokenizer``: 'bytes' or the path of a tokenizer.json. Raises ValueError."""
    return BytesTokenizer() if name == BYTES else HuggingFaceTokenizer(Path(name).expanduser().absolute())
