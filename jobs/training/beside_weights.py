"""Handles the files beside weights in a Hugging Face directory: the tokenizer, and generation settings.

A run keeps them, in the form of its exports, in `FOLDER` of its directory: the tokenizer's files and those
beside imported weights may be gone at export.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Final

from braid.actors.config import Config, ConfigError
from braid.actors.config.paths import BYTES
from braid.jobs.data.chat import TEMPLATE_FILE, ChatTemplate, ends_of_answers
from braid.jobs.data.tokenizer import (
    GENERATION,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    TOKENIZER_PARTS,
    Tokenizer,
    content_of,
)
from braid.scheduling.model.presets.hugging_face import CONFIG

FOLDER: Final = "tokenizer"
_BASE: Final = "base.sha256"
"""File in a run's directory with the digest of the model that its adapters belong to."""
_SAMPLED_BYTES: Final = 1 << 24
"""Bytes at both ends of a file that its digest covers: a whole model takes minutes to read."""
_TOKEN_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of the tokens that begin, end and pad texts, in `GENERATION` and in `CONFIG`."""


def keep(config: Config, tokenizer: Tokenizer, run: Path) -> None:
    """Write the files that exports need beside their weights into a run's directory. Raise `OSError` if that
    fails."""
    if tokenizer.name == BYTES:
        files = {TOKENIZER_FILE: tokenizer.backend.to_str().encode()}
    else:
        path = Path(tokenizer.name)
        beside = {name: path.with_name(name) for name in TOKENIZER_PARTS}
        files = {name: file.read_bytes() for name, file in beside.items() if file.is_file()}
        files[TOKENIZER_FILE] = path.read_bytes()
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_token}
    files.setdefault(TOKENIZER_CONFIG, json.dumps(made, indent=2).encode())
    ends = [tokenizer.end_of_document]  # the token that ends a document also ends generated text
    chats = (data for data in config.data.sets.values() if data.format == "chat")
    if (chat := next(chats, None)) is not None:
        template = ChatTemplate.of(chat, tokenizer)
        files[TEMPLATE_FILE] = template.source.encode()
        ends += ends_of_answers(template, tokenizer)
    initial = config.model.initial
    settings = {} if initial is None else _settings(initial, files[TOKENIZER_FILE])
    told = settings.get("eos_token_id")
    known = told if isinstance(told, list) else [] if told is None else [told]
    if new := [end for end in dict.fromkeys(ends) if end not in known]:
        every = [*known, *new]
        settings = {**settings, "eos_token_id": every if len(every) > 1 else every[0]}
    files[GENERATION] = f"{json.dumps(settings, indent=2)}\n".encode()
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def keep_base(config: Config, run: Path) -> None:
    """Write a digest of the model that a run's adapters belong to into its directory, if it has adapters."""
    if config.model.lora is not None and config.model.initial is not None:
        (run / _BASE).write_text(_digest(config.model.initial), encoding="utf-8")


def check_base(run: Path, initial: Path) -> None:
    """Raise `ConfigError` if the weights in ``initial`` are not those that a run's adapters belong to; runs
    that have kept no digest pass."""
    if (run / _BASE).is_file() and (run / _BASE).read_text(encoding="utf-8") != _digest(initial):
        raise ConfigError(
            f"model.initial={str(initial)!r} has changed since the run {run} began, and its adapters belong "
            f"to the weights as they were; bring them back, or begin a run of another name"
        )


def _digest(directory: Path) -> str:
    """Return a digest of names, sizes, begins and ends of all files of weights in a directory."""
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            digest.update(content.read(_SAMPLED_BYTES))
            content.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(content.read(_SAMPLED_BYTES))
    return digest.hexdigest()


def copy_kept(checkpoint: Path, export: Path) -> dict[str, Any] | None:
    """Copy the files that a checkpoint's run has kept into a directory of its weights; return the token ids
    for `CONFIG`, or None if the run has kept nothing."""
    folder = checkpoint.resolve().parent.parent / FOLDER
    if not (folder / GENERATION).is_file():
        return None
    for file in folder.iterdir():
        shutil.copyfile(file, export / file.name)
    settings = content_of(folder / GENERATION)
    return {key: settings[key] for key in _TOKEN_IDS if key in settings}


def _settings(initial: Path, tokenizer: bytes) -> dict[str, Any]:
    """Return the generation settings of imported weights; token ids only if they belong to ``tokenizer``."""
    config = content_of(initial / CONFIG)
    ids = {key: config[key] for key in _TOKEN_IDS if config.get(key) is not None}
    settings = content_of(initial / GENERATION) or ids
    file = initial / TOKENIZER_FILE
    if file.is_file() and file.read_bytes() == tokenizer:
        return settings
    return {key: value for key, value in settings.items() if "token_id" not in key}
