"""``braid evaluate``: scores a model on tasks of lm-eval, the usual harness for them."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from braid.actors.config import ConfigError
from braid.jobs.commands.checkpoint import Which
from braid.jobs.commands.weights import (
    RunOrWeights,
    begins,
    check_installed,
    check_source,
    first_line,
    opened,
    weights_of,
)
from braid.jobs.output import answer, check_outputs, table_of, write_output
from braid.jobs.usage import AsJson
from braid.scheduling.text.json_text import json_text
from braid.scheduling.text.suggestions import nearest


def evaluate(
    source: RunOrWeights,
    tasks: Annotated[str, typer.Option(help="Names of lm-eval's tasks or groups, with commas between.")],
    include_path: Annotated[
        Path | None, typer.Option(help="A folder with task files of your own; they may run code.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Examples of each task; by default all.", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Examples that are computed together.", min=1)] = 8,
    output: Annotated[Path | None, typer.Option(help="Also write the results to this file, as JSON.")] = None,
    checkpoint: Which = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on tasks such as arc_easy or mmlu; lm-eval fetches their data sets."""
    check_outputs(output=output)
    check_installed("evaluate", "lm_eval", "evaluate")
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"--include-path {include_path} is no folder; give the folder of task files")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    check_source(source)
    manager = _known(names, tasks, include_path)
    with weights_of(source, checkpoint) as folder:
        model, tokenizer = opened(source, folder)
        from lm_eval import evaluator, simple_evaluate
        from lm_eval.models.huggingface import HFLM

        scored = HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=batch, add_bos_token=begins(model, tokenizer)
        )
        evaluator.get_git_commit_hash = lambda: None  # git complains outside of its checkouts
        found = simple_evaluate(
            model=scored, tasks=names, limit=limit, task_manager=manager, log_samples=False
        )
    content = {"source": str(source), "checkpoint": checkpoint, "limit": limit}
    content |= {key: found[key] for key in ("results", "n-samples", "n-shot", "versions")}
    if output is not None:
        write_output("output", output, json_text(content, indent=1))
    answer(as_json, lambda: content, lambda: Console().print(_table(found)))


def _known(names: list[str], tasks: str, folder: Path | None) -> Any:
    """Return lm-eval's tasks, once those of these names can be loaded; raise `ConfigError` if not."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        manager = TaskManager(include_path=folder, include_defaults=False)
        if not names or {*names} - {*manager.all_tasks}:
            manager = TaskManager(include_path=folder)  # reads thousands of files
        for name in names or [tasks]:
            if name not in manager.all_tasks:
                near = nearest(name, manager.all_tasks)
                hint = f"did you mean {near!r}? " if near else ""
                raise ConfigError(
                    f"--tasks {tasks}: lm-eval has no task {name!r}; {hint}--include-path names a folder of "
                    f"your own tasks"
                )
        manager.load(names)
    except ConfigError:
        raise
    except Exception as error:  # of any type: task files hold templates, code, names of data sets
        raise ConfigError(
            f"--tasks {tasks} cannot be loaded: {first_line(error)}; see to the network, or name a folder of "
            f"your own tasks with --include-path"
        ) from None
    return manager


def _table(found: Any) -> Any:
    table = table_of("", ["task", "metric"], ["value", "±", "examples"], box=None)
    for name, scores in found["results"].items():
        count = found["n-samples"].get(name, {}).get("effective", "")
        for key, value in sorted(scores.items()):
            metric, _, kind = key.partition(",")
            if isinstance(value, float) and kind and not metric.endswith("_stderr"):
                error = scores.get(f"{metric}_stderr,{kind}")
                spread = f"{error:.4f}" if isinstance(error, float) else ""
                label = metric if kind == "none" else f"{metric} ({kind})"
                table.add_row(name, label, f"{value:.4f}", spread, str(count))
    return table
