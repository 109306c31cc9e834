"""Which of a Hugging Face tokenizer's tokens ends a document.

The configuration says it, or the files beside ``tokenizer.json`` do, or the tokenizer has exactly one token
of a name that is known for that. Nothing else is guessed: models learn from that token where texts stop.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

KEY: Final = "data.end_token"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
GENERATION: Final = "generation_config.json"
NAMES: Final = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|eos|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 - DeepSeek's
)
_BESIDE: Final = (TOKENIZER_CONFIG, "special_tokens_map.json", GENERATION, "config.json")
"""Files that may say it, the tokenizer's own first: models made for chats have further ends."""
_NAMED: Final = 12
"""At most so many candidates are named in a message."""


def end_token(path: Path, ids: Mapping[str, int], special: list[str], wanted: str | None) -> str:
    """The name of the token of ``path``, a tokenizer, that ends documents.

    ids: all tokens by name; special: the tokens that are marked as special; wanted: the configuration's
    choice. `ValueError` names candidates where nothing is said, or what is said is no token of the tokenizer.
    """
    candidates = _listed([name for name in special if name in ids])
    if wanted is not None:
        if wanted not in ids:
            raise ValueError(
                f"{KEY}: {wanted!r} is no token of {str(path)!r}; name one, such as {candidates}"
            )
        return wanted
    names = {number: name for name, number in ids.items()}
    for file in _BESIDE:
        said = _ends(content_of(path.parent / file), names)
        if len(said) == 1:
            if said[0] not in ids:
                raise ValueError(
                    f"{KEY}: {path.parent / file} ends texts with {said[0]!r}, which is no token of "
                    f"{str(path)!r}; set {KEY} to one, such as {candidates}"
                )
            return str(said[0])
    match [name for name in NAMES if name in ids]:
        case [name]:
            return name
        case []:
            raise ValueError(
                f"{KEY}: neither {str(path)!r} nor a file beside it says which token ends a document; "
                f"set {KEY} to one, such as {candidates}"
            )
        case several:
            raise ValueError(
                f"{KEY}: {str(path)!r} has {_listed(several)}, and no file beside it says which ends a "
                f"document; set {KEY} to one of them"
            )


def special_names(folder: Path) -> set[str]:
    """Names of the tokens that a tokenizer's files give a task of their own (``bos_token``, ...)."""
    content = {**content_of(folder / "special_tokens_map.json"), **content_of(folder / TOKENIZER_CONFIG)}
    return {name for key, value in content.items() if key.endswith("_token") if (name := _name(value))}


def _ends(content: Mapping[str, Any], names: Mapping[int, str]) -> list[str | int]:
    """What a file says: names of tokens, or the number of a token that has no name."""
    if name := _name(content.get("eos_token")):
        return [name]
    told = content.get("eos_token_id")
    numbers = told if isinstance(told, list) else [told]
    return [names.get(number, number) for number in numbers if type(number) is int]


def _name(token: Any) -> str | None:
    """A token stands there as a text, or as its text among its properties."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def content_of(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing if there is none, or it holds no keys and values."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _listed(names: list[str]) -> str:
    if not names:
        return "'<|endoftext|>' after adding it with `tokenizer.add_special_tokens(['<|endoftext|>'])`"
    return ", ".join(map(repr, names[:_NAMED])) + (", ..." if len(names) > _NAMED else "")
