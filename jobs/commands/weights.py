"""Weights for `transformers`, as generation and evaluation take them: a folder, or the export of a run."""

import contextlib
import importlib.util
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from braid.actors.config import ConfigError
from braid.jobs.commands.checkpoint import Which, checkpoints_at, chosen, write_weights
from braid.scheduling.model.presets.hugging_face import CONFIG

RunOrWeights = Annotated[
    Path,
    typer.Argument(
        help="A run, one of its checkpoints, or a folder of Hugging Face weights.", metavar="RUN|DIR"
    ),
]


def check_installed(command: str, module: str, extra: str) -> None:
    """Raise `ConfigError` if a module that a command needs is not installed; ``extra``: of this package."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"braid {command} needs the module {module}, which is not installed: pip install 'braid[{extra}]'"
        )


def check_source(source: Path) -> None:
    """Raise `ConfigError` if a path is neither a folder of weights, nor a run with checkpoints, nor one of
    its checkpoints."""
    if (source / CONFIG).is_file():
        if not any(source.glob("*.safetensors")):
            raise ConfigError(f"{source} holds {CONFIG} and no safetensors, and no other weights are read")
    elif (source / "adapter_config.json").is_file():
        raise ConfigError(
            f"{source} holds adapters without their model; give the run, or export it with --merge"
        )
    else:
        checkpoints_at(source)


@contextlib.contextmanager
def weights_of(source: Path, which: Which = None) -> Iterator[Path]:
    """Yield a folder with weights and tokenizer: ``source``, or for the length of the block the export of a
    run's checkpoint (`chosen`), in fp32. Raise `ConfigError` if there are no weights."""
    check_source(source)
    if not (source / CONFIG).is_file():
        found = chosen(source, which)
        with tempfile.TemporaryDirectory(prefix="braid-weights-") as folder:
            write_weights(found, Path(folder))
            yield Path(folder)
        return
    if which is not None:
        raise ConfigError(f"--checkpoint {which}: {source} holds weights and no checkpoints; leave it out")
    yield source


def opened(source: Path, folder: Path) -> tuple[Any, Any]:
    """Return the model and the tokenizer in a folder, by `transformers`, on the GPU if there is one.

    No code of the folder runs. ``source``: its name in messages. Raise `ConfigError` if files cannot be read.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as library

    library.set_verbosity_error()
    library.disable_progress_bar()
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, use_safetensors=True, output_loading_info=True, **options
            )
    except Exception as error:  # of many types, by the kind of the file
        raise ConfigError(f"transformers cannot read {source}: {first_line(error)}") from None
    model, state = loaded
    if lost := sorted(state["missing_keys"]):  # these would have random values
        raise ConfigError(f"{source} lacks the tensor {lost[0]}, which {CONFIG} says is there")
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def begins(model: Any, tokenizer: Any) -> bool:
    """Return whether texts begin with a special token: the tokenizer adds nothing else, and the generation
    settings name it. Braid trains texts without such a token, so that its own models have none."""
    return bool(tokenizer("").input_ids == [model.generation_config.bos_token_id])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings: reading weights loads libraries for other devices, which warn of each other."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def first_line(error: Exception) -> str:
    """Return what an exception says first, or its type if it says nothing."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
