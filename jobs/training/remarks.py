"""Remarks on a run before it begins, though nothing is wrong: one line each, with a remedy."""

from collections.abc import Iterator
from dataclasses import fields

from braid.actors.config import Config, ConfigError, read_content
from braid.actors.controller.records.json_lines import last_line
from braid.actors.stage.data.token_files import TRAIN, VALIDATION
from braid.actors.stage.state.learning_rate import LearningRate
from braid.jobs.data.chat import REMEDY, ChatTemplate
from braid.jobs.data.prepare import Prepared
from braid.jobs.data.tokenizer import tokenizer_of
from braid.jobs.output import counted

WITHOUT_BASE = (
    "model.lora trains adapters of random weights, which stay as train.seed draws them; give the model to "
    "adapt in model.initial"
)
_MOVED = 0.01
"""Relative difference from which a learning rate is considered to come from another curve."""


def on_data(config: Config, prepared: Prepared, share: float = 1.0) -> Iterator[str]:
    """Yield remarks on documents that were left out of a data set, and on splits that are too small for the
    run, which takes ``share`` of its samples from the data set."""
    index, train, sequence = prepared.index, config.train, config.model.sequence
    if index.documents_skipped and not prepared.reused:
        yield (
            f"data.files: {counted(index.documents_skipped, 'document')} not in UTF-8 left out; convert the "
            f"files, or keep what can be read with data.encoding_errors=replace"
        )
    if index.documents_empty and not prepared.reused:
        yield f"data.files: {counted(index.documents_empty, 'document')} without any text left out"
    windows = {split: index.samples(split, sequence) for split in (TRAIN, VALIDATION)}
    part = f"{share:.1%} of " if share < 1 else ""
    if 0 < windows[TRAIN] < train.global_batch * share:
        yield (
            f"the training split has {index.tokens(TRAIN)} tokens, {counted(windows[TRAIN], 'sample')} of "
            f"model.sequence={sequence}, and every step takes {part}train.global_batch="
            f"{train.global_batch}, the same text several times; add text to data.files"
        )
    if config.data.validation_fraction and 0 < windows[VALIDATION] < int(train.validation_samples * share):
        yield (
            f"validation takes all {counted(windows[VALIDATION], 'sample')} that are held out, where "
            f"{part}train.validation_samples={train.validation_samples} asks for more; raise "
            f"data.validation_fraction, or add text to data.files"
        )


def on_template(config: Config) -> Iterator[str]:
    """Yield a remark on a chat template with which the loss counts more than the answers."""
    if config.data.format == "chat":
        template = ChatTemplate.of(config.data, tokenizer_of(config))
        if template.hides_prompts:
            yield (
                f"data.chat_template: {template.origin} neither marks answers nor heeds "
                f"add_generation_prompt, so that the loss also learns what it writes before an answer, such "
                f"as the role; {REMEDY}"
            )


def on_learning_rate(config: Config, *, resume: bool) -> Iterator[str]:
    """Yield remarks on a warm-up that does not end, and on a resumed run that follows another curve than it
    began with, whether the rate jumps or only its horizon moves."""
    train = config.train
    if train.warmup_steps > train.steps:
        yield (
            f"train.warmup_steps={train.warmup_steps} is more than train.steps={train.steps}: the run ends "
            f"before the learning rate reaches train.lr; lower train.warmup_steps"
        )
    before = last_line(config.run_directory / "metrics.jsonl") if resume else {}
    step, rate = before.get("step"), before.get("lr")
    if not step or not rate or step >= train.steps:
        return
    curve = LearningRate(**{field.name: getattr(train, field.name) for field in fields(LearningRate)})
    changes = ", ".join(_changes(config))
    after, last = curve.learning_rate(step), curve.learning_rate(train.steps - 1)
    if abs(curve.learning_rate(step - 1) - rate) > _MOVED * rate:
        yield (
            f"the learning rate goes from {rate:.3g} in step {step} to {after:.3g} in "
            f"the next one, as its curve is another one than the run began with"
            f"{f' ({changes})' if changes else ''}: keep train.schedule, train.steps, train.decay_steps, "
            f"train.lr, train.warmup_steps and train.min_lr_fraction, or lower train.lr"
        )
    elif changes:
        yield (
            f"{changes}: the learning rate goes on from {rate:.3g} in step {step}, and ends with {last:.3g} "
            f"in step {train.steps}"
        )


def _changes(config: Config) -> Iterator[str]:
    """Yield the keys of the learning rate that a resumed run changes."""
    try:
        before = read_content(config.run_directory / "config.yaml").get("train")
    except ConfigError:
        return
    for name in (field.name for field in fields(LearningRate)):
        now = getattr(config.train, name)
        if isinstance(before, dict) and name in before and before[name] != now:
            yield f"train.{name} was {before[name]} and is {now} now"
