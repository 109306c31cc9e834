"""``braid generate`` and ``braid evaluate``: what a run's model, or one in a folder of Hugging Face weights,
makes of a text, by `transformers`; and how it scores on tasks of lm-eval, the usual harness for them."""

import contextlib
import importlib.util
import logging
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from braid.actors.config import ConfigError
from braid.jobs.commands.checkpoint import Which, checkpoints_at, chosen, write_weights
from braid.jobs.output import answer, check_outputs, complain, first_line, table_of, write_output
from braid.jobs.usage import AsJson
from braid.scheduling.model.presets.hugging_face import CONFIG
from braid.scheduling.text.json_text import json_text
from braid.scheduling.text.suggestions import nearest

RunOrWeights = Annotated[
    Path,
    typer.Argument(
        help="A run, one of its checkpoints, or a folder of Hugging Face weights.", metavar="RUN|DIR"
    ),
]


def _check_installed(command: str, module: str, extra: str) -> None:
    """Raise `ConfigError` if a module that a command needs is not installed; ``extra``: of this package."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"braid {command} needs the module {module}, which is not installed: pip install 'braid[{extra}]'"
        )


def _check_source(source: Path) -> None:
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
    _check_source(source)
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


def _begins(model: Any, tokenizer: Any) -> bool:
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


def generate(
    source: RunOrWeights,
    prompt: Annotated[str, typer.Option(help="The beginning of the text, or with --chat the question.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", min=1)] = 100,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token; by default as the settings say, or 0.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that have this share together.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws; by default another each time.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the tokenizer's chat template.")
    ] = False,
    checkpoint: Which = None,
) -> None:
    """Print what a model makes of the beginning of a text, as it comes, to the token that ends texts."""
    drawing = _drawing(temperature, top_p)
    if not prompt:
        raise ConfigError("--prompt is empty; give some text")
    _check_installed("generate", "transformers", "hub")
    with weights_of(source, checkpoint) as folder:
        model, tokenizer = opened(source, folder)
        import torch
        from transformers import TextStreamer

        if chat:
            given = _in_template(tokenizer, prompt, str(source))
        else:
            given = tokenizer(prompt, add_special_tokens=_begins(model, tokenizer)).input_ids
        length = model.config.max_position_embeddings
        room = length - len(given)
        if room < 1:
            raise ConfigError(
                f"--prompt has {len(given)} tokens, more than sequences of {source} ({length}); shorten it"
            )
        settings = model.generation_config
        if "top_k" not in settings.to_diff_dict():
            drawing["top_k"] = 0  # the library would draw from the 50 likeliest
        unused = range(max(tokenizer.get_vocab().values()) + 1, model.config.vocab_size)
        if unused and settings.suppress_tokens is None:  # rows that only round the vocabulary up
            drawing["suppress_tokens"] = [*unused]
        ends = settings.eos_token_id
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        torch.seed() if seed is None else torch.manual_seed(seed)
        ids = torch.tensor([given], device=model.device)
        (made,) = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            max_new_tokens=min(max_tokens, room),
            pad_token_id=ends[0] if ends else 0,
            **drawing,
        )
        if len(made) == length and max_tokens > room and int(made[-1]) not in ends:
            complain(f"stopped at {length} tokens, the length of the sequences that {source} was trained on")


def _drawing(temperature: float | None, top_p: float | None) -> dict[str, Any]:
    """Return the library's settings for two options; raise `ConfigError` for values that make no sense."""
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature {temperature:g} must be a number from 0 on")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"--top-p {top_p:g} must be above 0 and at most 1")
    if temperature == 0 and top_p is not None:
        raise ConfigError(
            "--top-p draws tokens, and --temperature 0 takes the likeliest; leave one of both out"
        )
    if temperature == 0:
        return {"do_sample": False}
    given: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
    drawn = {key: value for key, value in given.items() if value is not None}
    return {"do_sample": True, **drawn} if drawn else {}


def _in_template(tokenizer: Any, prompt: str, source: str) -> list[int]:
    """Return the tokens of a user's message in the tokenizer's chat template, to the begin of the answer."""
    if tokenizer.chat_template is None:
        raise ConfigError(f"--chat: the tokenizer of {source} has no chat template; leave --chat out")
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except (TemplateError, ValueError) as error:
        raise ConfigError(
            f"--chat: the chat template of {source} refuses a user's message: {error}"
        ) from None
    return list(tokenizer(text, add_special_tokens=False).input_ids)


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
    _check_installed("evaluate", "lm_eval", "evaluate")
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"--include-path {include_path} is no folder; give the folder of task files")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    _check_source(source)
    manager = _known(names, tasks, include_path)
    with weights_of(source, checkpoint) as folder:
        model, tokenizer = opened(source, folder)
        from lm_eval import evaluator, simple_evaluate
        from lm_eval.models.huggingface import HFLM

        scored = HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=batch, add_bos_token=_begins(model, tokenizer)
        )
        evaluator.get_git_commit_hash = lambda: None  # git complains outside of its checkouts
        found = simple_evaluate(
            model=scored, tasks=names, limit=limit, task_manager=manager, log_samples=False
        )
    content = {"source": str(source), "checkpoint": checkpoint, "limit": limit}
    content |= {key: found[key] for key in ("results", "n-samples", "n-shot", "versions")}
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
            f"--tasks {tasks} cannot be loaded: {first_line(error)}; see to the network, or name a folder "
            f"of your own tasks with --include-path"
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
