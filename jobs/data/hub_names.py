"""Replaces names of repositories on the Hugging Face Hub in a configuration by folders with their files.

``huggingface_hub`` fetches the files into its cache (``HF_HOME``), which all programs that use the Hub share.
Without a network, the cache's copies are taken.
"""

from pathlib import Path
from typing import Final

from braid.actors.config import Config, ConfigError
from braid.actors.config.paths import is_hub_name
from braid.jobs.data.tokenizer import BESIDE, TOKENIZER_FILE, TOKENIZER_PARTS

_TOKENIZER: Final = (TOKENIZER_FILE, *BESIDE, *TOKENIZER_PARTS)
_WEIGHTS: Final = (*_TOKENIZER, "model*.safetensors", "model.safetensors.index.json")
"""Patterns of the files to fetch: numbers and text, never pickles or code."""


def with_hub_files(config: Config) -> Config:
    """Return a copy in which ``data.tokenizer`` and ``model.initial`` are paths, after fetching the
    repositories that they name. Raise `ConfigError` if a repository cannot be fetched."""
    initial, tokenizer = config.model.initial, config.data.tokenizer
    if initial is not None and is_hub_name("model.initial", str(initial)):
        config = config.changed(model={"initial": _fetched("model.initial", str(initial), _WEIGHTS)})
    if tokenizer is not None and is_hub_name("data.tokenizer", tokenizer):
        config = config.changed(data={"tokenizer": str(_fetched("data.tokenizer", tokenizer, _TOKENIZER))})
    return config


def _fetched(key: str, name: str, patterns: tuple[str, ...]) -> Path:
    """Return the folder of a repository's files that match ``patterns``, without those in subfolders."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(name, allow_patterns=[*patterns], ignore_patterns=["*/*"]))
    except RepositoryNotFoundError:  # also of one that only some may read
        why = "there is none that you may read: correct the name, or ask its owner, then `hf auth login`"
    except LocalEntryNotFoundError:
        why = "the Hub does not answer, and no copy is here: see to the network, or give a path"
    except Exception as error:  # of a name that cannot be one, or those of several HTTP clients
        why = f"it cannot be fetched: {error}".splitlines()[0]
    raise ConfigError(f"{key}={name!r} is no path here, and as a name on the Hugging Face Hub: {why}")
