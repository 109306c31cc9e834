"""``braid data``: commands about a run's data."""

from typing import Annotated, Literal

import typer
from rich.console import Console

from braid.actors.config import ConfigError
from braid.jobs.usage import ConfigFile, Overrides, example, group, read_config

data = group("Look at the data of a run.", "data show first.yaml --samples 2")


@data.command(epilog=example("data show chat.yaml --samples 2 --split validation"))
def show(
    config: ConfigFile,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(help="Number of samples.", min=1)] = 3,
    split: Annotated[Literal["train", "validation"], typer.Option(help="Split of the data.")] = "train",
) -> None:
    """Print samples as text, in the order of training; text whose loss does not count is dim, or in [- -]."""
    from braid.actors.stage.data.mixture import open_splits
    from braid.jobs.data.data_sets import prepare_data
    from braid.jobs.data.executors import local_map
    from braid.jobs.data.show import show_sample
    from braid.jobs.data.tokenizer import tokenizer_of
    from braid.jobs.planning.work import with_plan
    from braid.jobs.training.display import Display

    resolved = with_plan(read_config(config, overrides))
    if split == "validation" and not resolved.data.validates:
        raise ConfigError(
            "--split validation: data.validation_fraction=0.0 holds no document out; raise it, or leave "
            "--split out"
        )
    with Display(Console(stderr=True), live=False).running() as display:
        prepared = prepare_data(resolved, local_map, display.show)
    held_out = [name for name, one in resolved.data.sets.items() if one.validation_fraction > 0]
    wanted = held_out if split == "validation" else ()
    train, validation = open_splits(prepared.output, resolved.model.sequence, wanted)
    shards = train if validation is None else validation
    count, tokenizer = min(samples, shards.samples), tokenizer_of(resolved)
    ids = shards.order(resolved.train.seed, 0, count) if split == "train" else shards.spread(count)
    for number, (sample, of) in enumerate(zip(ids.tolist(), shards.sets_of(ids).tolist(), strict=True)):
        title = " ".join(filter(None, (f"sample {number}:", shards.names[of], split, str(sample))))
        show_sample(Console(), title, sample, shards, tokenizer)
