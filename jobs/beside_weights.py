"""What stands beside weights in a Hugging Face directory: the tokenizer, and how text is generated.

A run keeps it as its exports will have it, in `FOLDER` of its directory: the tokenizer's files and those
beside imported weights may have gone when somebody exports.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from braid.actors.config import Config
from braid.actors.config.paths import BYTES
from braid.jobs.data.end_token import GENERATION, TOKENIZER_CONFIG, content_of
from braid.jobs.data.tokenizer import TOKENIZER_FILE, Tokenizer
from braid.scheduling.presets.hugging_face import CONFIG

FOLDER: Final = "tokenizer"
_FILES: Final = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Of a tokenizer, beside `TOKENIZER_FILE`."""
_TOKEN_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Which tokens begin, end and fill up texts: in `GENERATION` and in `CONFIG`."""


def keep(config: Config, tokenizer: Tokenizer, run: Path) -> None:
    """Write into a run's directory what its exports will have beside their weights. Raises `OSError`."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    for name, content in _beside(config, tokenizer).items():
        (folder / name).write_bytes(content)


def kept_by(checkpoint: Path) -> Path | None:
    """The folder that the run of a checkpoint has kept; None if there is none."""
    folder = checkpoint.resolve().parent.parent / FOLDER
    return folder if (folder / GENERATION).is_file() else None


def token_ids(folder: Path) -> dict[str, Any]:
    """What `CONFIG` says of tokens."""
    content = content_of(folder / GENERATION)
    return {key: content[key] for key in _TOKEN_IDS if key in content}


def copy_beside(folder: Path, export: Path) -> None:
    """Put what a run has kept into a directory of its weights."""
    for file in folder.iterdir():
        shutil.copyfile(file, export / file.name)


def _beside(config: Config, tokenizer: Tokenizer) -> dict[str, bytes]:
    """All files by name."""
    if tokenizer.name == BYTES:
        files = {TOKENIZER_FILE: _bytes_tokenizer(tokenizer).encode()}
    else:
        path = Path(tokenizer.name)
        files = {name: path.with_name(name).read_bytes() for name in _FILES if path.with_name(name).is_file()}
        files[TOKENIZER_FILE] = path.read_bytes()
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_token}
    files.setdefault(TOKENIZER_CONFIG, json.dumps(made, indent=2).encode())
    initial = config.model.initial
    given = {} if initial is None else _settings(initial, files[TOKENIZER_FILE])
    settings = _ending(given, tokenizer.end_of_document)
    files[GENERATION] = f"{json.dumps(settings, indent=2)}\n".encode()
    return files


def _settings(initial: Path, tokenizer: bytes) -> dict[str, Any]:
    """How text is generated with imported weights; ids of tokens only if they are those of ``tokenizer``."""
    config = content_of(initial / CONFIG)
    ids = {key: config[key] for key in _TOKEN_IDS if config.get(key) is not None}
    found = content_of(initial / GENERATION) or ids
    file = initial / TOKENIZER_FILE
    if file.is_file() and file.read_bytes() == tokenizer:
        return found
    return {key: value for key, value in found.items() if "token_id" not in key}


def _ending(settings: dict[str, Any], end: int) -> dict[str, Any]:
    """The same settings, where the end of documents is among the tokens that end a text."""
    ends = settings.get("eos_token_id")
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end in known:
        return settings
    return {**settings, "eos_token_id": [*known, end] if known else end}


def _bytes_tokenizer(tokenizer: Tokenizer) -> str:
    """A `TOKENIZER_FILE` that makes the same ids of text as our tokenizer of bytes."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(_letters(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(tokenizer.end_token, special=True)])
    return str(backend.to_str())


def _letters() -> dict[str, int]:
    """The letter that the library writes for each byte: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }
    return {letters[byte]: byte for byte in range(256)}
