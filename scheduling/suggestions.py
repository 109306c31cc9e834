"""What somebody meant who wrote a name that is not known: keys, presets, schedules, choices and commands.

First what differs in case, dashes and dots alone; then what other systems call it; then what looks alike.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Final

OTHER_WORDS: Final = {
    # of PyTorch, Hugging Face, Megatron-LM and DeepSpeed
    "accumulation_steps": "train.global_batch",
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "adam_epsilon": "train.eps",
    "batch_size": "train.global_batch",
    "beta1": "train.betas",
    "beta2": "train.betas",
    "checkpoint_activations": "train.recompute",
    "checkpoint_interval": "checkpoint.every",
    "clip_grad": "train.clip_norm",
    "context_length": "model.sequence",
    "context_parallel_size": "parallel.cp",
    "d_model": "model.hidden",
    "data_parallel_size": "parallel.dp",
    "data_path": "data.files",
    "dataset": "data.files",
    "epochs": "train.steps",
    "eval_interval": "train.validate_every",
    "eval_steps": "train.validate_every",
    "expert_model_parallel_size": "parallel.ep",
    "expert_parallel": "parallel.ep",
    "ffn_hidden_size": "model.ffn",
    "fp16": "bf16 train.dtype",
    "ddp": "parallel.dp",
    "fsdp": "parallel.zero=3",
    "fully_sharded": "parallel.zero=3",
    "global_batch_size": "train.global_batch",
    "grad_clip": "train.clip_norm",
    "gradient_accumulation_steps": "train.global_batch",
    "gradient_checkpointing": "train.recompute",
    "gradient_clipping": "train.clip_norm",
    "hidden_dim": "model.hidden",
    "hidden_size": "model.hidden",
    "intermediate_size": "model.ffn",
    "iterations": "train.steps",
    "learning_rate": "train.lr",
    "log_dir": "runs",
    "max_grad_norm": "train.clip_norm",
    "max_seq_len": "model.sequence",
    "max_steps": "train.steps",
    "micro_batch_size": "train.micro_batch",
    "min_lr": "train.min_lr_fraction",
    "n_head": "model.heads",
    "n_layer": "model.layers",
    "num_attention_heads": "model.heads",
    "num_epochs": "train.steps",
    "num_experts": "model.experts",
    "num_heads": "model.heads",
    "num_hidden_layers": "model.layers",
    "num_key_value_heads": "model.kv_heads",
    "num_layers": "model.layers",
    "output_dir": "runs",
    "per_device_train_batch_size": "train.micro_batch",
    "pipeline_model_parallel_size": "parallel.pp",
    "pipeline_parallel": "parallel.pp",
    "precision": "train.dtype",
    "random_seed": "train.seed",
    "rms_norm_eps": "model.norm_eps",
    "rope_theta": "model.rotary_base",
    "save_dir": "runs",
    "save_every": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "seq_len": "model.sequence",
    "seq_length": "model.sequence",
    "sequence_length": "model.sequence",
    "tensor_model_parallel_size": "parallel.tp",
    "tensor_parallel": "parallel.tp",
    "tie_word_embeddings": "model.tied_head",
    "train_steps": "train.steps",
    "training_steps": "train.steps",
    "validation_interval": "train.validate_every",
    "vocab_size": "model.vocabulary",
    "warmup": "train.warmup_steps",
    "wd": "train.weight_decay",
    "zero1": "parallel.zero=1",
    "zero2": "parallel.zero=2",
    "zero3": "parallel.zero=3",
    "zero_stage": "parallel.zero",
    # sections
    "training": "train",
    "trainer": "train",
    "dataset_config": "data",
    "parallelism": "parallel",
    "logging": "telemetry",
    "checkpointing": "checkpoint",
    # schedules
    "1f1b": "megatron",
    "gpipe": "megatron",
    "none": "megatron",
    "serial": "megatron",
    "dualpipe": "dualpipev",
    "interleaved_1f1b": "interleaved",
    "zero_bubble": "zbv",
    # numbers and choices
    "float32": "fp32 train.dtype",
    "float": "fp32",
    "float64": "fp64 train.dtype",
    "double": "fp64",
    "bfloat16": "bf16 train.dtype",
    "bf16": "train.dtype",
    "float16": "bf16 train.dtype",
    "half": "bf16",
    "gpu": "cuda",
    "mpi": "gloo",
    "local": "processes",
    "process": "processes",
    "threads": "processes",
    "json": "jsonl",
    "txt": "text",
    # commands
    "run": "train",
    "fit": "train",
    "tokenize": "prepare",
    "tokenise": "prepare",
    "preprocess": "prepare",
    "models": "presets",
    "clusters": "presets",
    "benchmark": "bench",
    "web": "dashboard",
    "ui": "dashboard",
    "k8s": "kubernetes",
}
"""What others call it, and what it is called here: a key with its section, perhaps with a value, or a choice;
several where one word is used for several things."""

_MOST_CHARACTERS: Final = 100
"""Of a list that is told although one name of it was meant."""

_ALIKE: Final = 0.9
"""Texts as alike as that are one text with a slip; less so, the same beginning says more."""


def plain(name: str) -> str:
    """A name without what people write differently: case, dashes, dots, underscores."""
    return re.sub(r"[^a-z0-9*]", "", name.lower())


_OTHERS: Final = {plain(word): ours.split() for word, ours in OTHER_WORDS.items()}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` names that ``name`` most likely stands for; None where none is near."""
    names = list(known)
    by_plain = {plain(one): one for one in reversed(names)}
    wanted = plain(name)
    if wanted in by_plain:
        return by_plain[wanted]
    if ours := [one for one in _OTHERS.get(wanted, ()) if one in names]:
        return ours[0]
    close = difflib.get_close_matches(wanted, by_plain, n=1)
    if close and difflib.SequenceMatcher(None, wanted, close[0]).ratio() > _ALIKE:
        return by_plain[close[0]]
    inside = [one for one in by_plain if len(one) > 2 and wanted.startswith(one)]
    longer = [one for one in by_plain if len(wanted) > 2 and one.startswith(wanted)]
    if near := [*sorted(inside, key=len, reverse=True), *sorted(longer, key=len), *close]:
        return by_plain[near[0]]
    return None


def key_called(name: str) -> str:
    """The key that others call ``name``, perhaps with a value, as ``parallel.zero=3``; empty without one."""
    return next((one for one in _OTHERS.get(plain(name), ()) if "." in one), "")


def hint(name: str, known: Iterable[str]) -> str:
    """``did you mean 'lr'?``, or what it is called here; empty where nothing is near."""
    if (near := nearest(name, known)) is not None:
        return f"did you mean {near!r}?"
    ours = key_called(name)
    return f"here that is {ours}" if ours else ""


def must_be_one_of(value: object, known: Iterable[object]) -> str:
    """``must be one of fp32, bf16; did you mean 'bf16'?``: the end of a message on a wrong choice. Of many
    choices only the one that was meant is told, where one is near."""
    names = [str(one) for one in known]
    listed = ", ".join(names)
    meant = hint(value, names) if isinstance(value, str) else ""
    if meant and len(listed) > _MOST_CHARACTERS:
        return f"is not known; {meant}"
    return f"must be one of {listed}" + (f"; {meant}" if meant else "")
