"""Guesses what an unknown name stands for: a key, preset, schedule or choice.

The first of these is taken: a known name that differs only in case, dashes and dots; Braid's name for another
system's word; a similar name.
"""

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

OTHER_WORDS: Final = {
    "train.global_batch": "accumulation_steps batch_size global_batch_size gradient_accumulation_steps",
    "train.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "train.eps": "adam_epsilon",
    "train.recompute": "checkpoint_activations gradient_checkpointing",
    "checkpoint.every": "checkpoint_interval save_every save_interval save_steps",
    "train.clip_norm": "clip_grad grad_clip gradient_clipping max_grad_norm",
    "model.sequence": "context_length max_seq_len seq_len seq_length sequence_length",
    "parallel.cp": "context_parallel_size",
    "model.hidden": "d_model hidden_dim hidden_size",
    "parallel.dp": "data_parallel_size ddp",
    "data.files": "data_path dataset path paths",
    "train.steps": "epochs iterations max_steps num_epochs train_steps training_steps",
    "train.validate_every": "eval_interval eval_steps validation_interval",
    "parallel.ep": "expert_model_parallel_size expert_parallel",
    "model.ffn": "ffn_hidden_size intermediate_size",
    "bf16": "fp16 bfloat16 float16 half",
    "parallel.zero=3": "fsdp fully_sharded zero3",
    "train.lr": "learning_rate",
    "runs": "log_dir output_dir save_dir",
    "train.micro_batch": "micro_batch_size per_device_train_batch_size",
    "train.min_lr_fraction": "min_lr",
    "model.heads": "n_head num_attention_heads num_heads",
    "model.layers": "n_layer num_hidden_layers num_layers",
    "model.experts": "num_experts",
    "model.kv_heads": "num_key_value_heads",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel",
    "train.seed": "random_seed",
    "model.norm_eps": "rms_norm_eps",
    "model.rotary_base": "rope_theta",
    "parallel.tp": "tensor_model_parallel_size tensor_parallel",
    "model.tied_head": "tie_word_embeddings",
    "model.vocabulary": "vocab_size",
    "train.dropout": "dropout_rate embd_pdrop hidden_dropout resid_dropout resid_pdrop",
    "train.label_smoothing": "label_smoothing_factor smoothing",
    "train.z_loss": "logit_z_loss lm_z_loss z_loss_coefficient z_loss_weight",
    "train.warmup_steps": "warmup",
    "train.weight_decay": "wd",
    "parallel.zero=1": "zero1",
    "parallel.zero=2": "zero2",
    "parallel.zero": "zero_stage",
    "train": "training trainer run fit",
    "data": "dataset_config",
    "parallel": "parallelism",
    "telemetry": "logging",
    "checkpoint": "checkpointing",
    "megatron": "1f1b gpipe none serial",
    "dualpipev": "dualpipe",
    "interleaved": "interleaved_1f1b",
    "zbv": "zero_bubble",
    "stable_decay": "wsd warmup_stable_decay",
    "rank": "r lora_r lora_rank",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "q": "q_proj query wq",
    "k": "k_proj key wk",
    "v": "v_proj value wv",
    "o": "o_proj out_proj wo dense",
    "up": "up_proj",
    "fp32": "float32 float",
    "fp64": "float64 double",
    "cuda": "gpu",
    "gloo": "mpi",
    "processes": "local process threads",
    "jsonl": "json",
    "text": "txt",
    "prepare": "tokenize tokenise preprocess",
    "presets": "models clusters",
    "bench": "benchmark",
    "dashboard": "web ui",
    "kubernetes": "k8s",
    "train.dtype": "fp16 precision float32 float64 bfloat16 bf16 float16",
}
"""Braid's name (a key with its section, perhaps with a value; a choice; a command) -> the names that PyTorch,
Hugging Face, Megatron-LM and DeepSpeed use. A word listed twice means the first name that is known."""

_MOST_CHARACTERS: Final = 100
"""Most characters of a list of known names that an error prints although it also suggests one of them."""

_ALIKE: Final = 0.9
"""Similarity ratio above which a name counts as mistyped; below it, a common beginning counts more."""


def plain(name: str) -> str:
    """Return a name in lower case without dashes, dots and underscores, which people write differently."""
    return re.sub(r"[^a-z0-9*]", "", name.lower())


_OTHERS: Final[dict[str, list[str]]] = defaultdict(list)
for _ours, _words in OTHER_WORDS.items():
    for _word in _words.split():
        _OTHERS[plain(_word)].append(_ours)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in ``known`` that ``name`` most likely stands for; None if no name is similar."""
    names = list(known)
    by_plain = {plain(candidate): candidate for candidate in reversed(names)}
    wanted = plain(name)
    if wanted in by_plain:
        return by_plain[wanted]
    if ours := [synonym for synonym in _OTHERS.get(wanted, ()) if synonym in names]:
        return ours[0]
    close = difflib.get_close_matches(wanted, by_plain, n=1)
    if close and difflib.SequenceMatcher(None, wanted, close[0]).ratio() > _ALIKE:
        return by_plain[close[0]]
    inside = [key for key in by_plain if len(key) > 2 and wanted.startswith(key)]
    longer = [key for key in by_plain if len(wanted) > 2 and key.startswith(wanted)]
    if near := [*sorted(inside, key=len, reverse=True), *sorted(longer, key=len), *close]:
        return by_plain[near[0]]
    return None


def key_called(name: str) -> str:
    """Return Braid's key (such as ``parallel.zero=3``) for what other systems call ``name``; empty if
    none."""
    return next((key for key in _OTHERS.get(plain(name), ()) if "." in key), "")


def hint(name: str, known: Iterable[str]) -> str:
    """Return an error text such as ``did you mean 'lr'?``, or one with Braid's key for another system's word.

    The text is empty if no name is similar.
    """
    if (near := nearest(name, known)) is not None:
        return f"did you mean {near!r}?"
    ours = key_called(name)
    return f"here that is {ours}" if ours else ""


def must_be_one_of(value: object, known: Iterable[object]) -> str:
    """Return the end of an error on a wrong choice, such as ``must be one of fp32, bf16; did you mean
    'bf16'?``.

    A long list of choices is left out if one choice is similar.
    """
    names = [str(choice) for choice in known]
    listed = ", ".join(names)
    meant = hint(value, names) if isinstance(value, str) else ""
    if meant and len(listed) > _MOST_CHARACTERS:
        return f"is not known; {meant}"
    return f"must be one of {listed}" + (f"; {meant}" if meant else "")
