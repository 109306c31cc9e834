"""``braid generate``: lets a run's model, or one in a folder of Hugging Face weights, go on with a text."""

import math
from typing import Annotated, Any

import typer

from braid.actors.config import ConfigError
from braid.jobs.commands.checkpoint import Which
from braid.jobs.commands.weights import RunOrWeights, begins, check_installed, opened, weights_of
from braid.jobs.output import complain


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
    check_installed("generate", "transformers", "hub")
    with weights_of(source, checkpoint) as folder:
        model, tokenizer = opened(source, folder)
        import torch
        from transformers import TextStreamer

        if chat:
            given = _in_template(tokenizer, prompt, str(source))
        else:
            given = tokenizer(prompt, add_special_tokens=begins(model, tokenizer)).input_ids
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
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)
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
    given: dict[str, Any] = {"temperature": temperature or None, "top_p": top_p}
    drawn = {key: value for key, value in given.items() if value is not None}
    return {"do_sample": bool(drawn), **drawn} if drawn or temperature == 0 else {}


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
