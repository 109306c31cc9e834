"""Renders conversations by a chat template, and finds the assistants' text in them.

A template is a Jinja file, as Hugging Face's tokenizers have it (``chat_template.jinja``, or the key
``chat_template`` of ``tokenizer_config.json``). The assistants' text is what the template writes between
``{% generation %}`` and ``{% endgeneration %}``. Of a template without these marks, an answer is what is
added by rendering one message more, without the prompt for the answer.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from braid.actors.config import DataConfig
from braid.actors.config.paths import BYTES
from braid.jobs.data.tokenizer import TOKENIZER_CONFIG, Encoded, Tokenizer, content_of, special_names
from braid.jobs.output import first_line

KEY: Final = "data.chat_template"
TEMPLATE_FILE: Final = "chat_template.jinja"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKS = "\ud800", "\ud801"
"""Begin and end of the assistants' text while a template is rendered: half surrogates, which no text has."""
_SPLIT = re.compile(f"([{''.join(_MARKS)}])")
REMEDY: Final = (
    "put {% generation %} before the assistant's answer and {% endgeneration %} behind it in the template, "
    f"and name the file in {KEY}"
)


@dataclass(frozen=True)
class Conversation:
    """Messages, each with ``role`` and ``content``, and the tools that they may call."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    place: Callable[[], str]
    """Function that tells file and line, for messages."""


Rendered = tuple[str, list[tuple[int, int]]]
"""The text of a conversation; begin and end, in characters, of each piece of it that is the assistants'."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the variables that the tokenizer gives it (``bos_token``, ``eos_token``, ...)."""

    source: str
    origin: str
    """Where the template is from, for messages."""
    variables: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, data: DataConfig, tokenizer: Tokenizer) -> "ChatTemplate":
        """Return the configuration's template or that of the tokenizer's files."""
        folder = None if tokenizer.name == BYTES else Path(tokenizer.name).parent
        variables = {"eos_token": tokenizer.end_token, **(special_names(folder) if folder else {})}
        source, origin = _read(data.chat_template) if data.chat_template else _beside_tokenizer(folder)
        _compiled(source, origin)
        return cls(source, origin, tuple(sorted(variables.items())))

    def render(self, conversation: Conversation) -> Rendered:
        """Render a conversation. Raise `ValueError` if the template refuses it, or does not show where the
        assistants' text is."""
        if _MARKED.search(self.source):
            return _without_marks(self._text(conversation, conversation.messages))
        return self._by_prefixes(conversation)

    @property
    def hides_prompts(self) -> bool:
        """Whether answers that the template renders begin with their prompt, such as the name of the role: it
        neither marks answers nor writes prompts alone."""
        asked = Conversation([{"role": "user", "content": "a"}], None, lambda: "a conversation")
        try:
            alike = self._text(asked, asked.messages) == self._text(asked, asked.messages, prompt=True)
        except ValueError:  # it refuses this message
            return False
        return alike and not _MARKED.search(self.source)

    def _by_prefixes(self, conversation: Conversation) -> Rendered:
        messages = conversation.messages
        text, spans = self._text(conversation, messages), list[tuple[int, int]]()
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._text(conversation, messages[:number], prompt=True)
                after = self._text(conversation, messages[: number + 1])
                if not (text.startswith(after) and after.startswith(before)):
                    raise ValueError(
                        f"{KEY}: {self.origin} renders the first messages of {conversation.place()} "
                        f"otherwise than the whole, so that the assistant's text cannot be told; {REMEDY}"
                    )
                spans.append((len(before), len(after)))
        return text, spans

    def _text(
        self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], prompt: bool = False
    ) -> str:
        """Render messages; ``prompt``: add the beginning of an answer."""
        variables = {**dict(self.variables), "messages": messages, "tools": conversation.tools}
        try:
            text: str = _compiled(self.source, self.origin).render(
                **variables, documents=None, add_generation_prompt=prompt
            )
        except Exception as fault:  # templates are programs, which fail as they like
            raise ValueError(
                f"data.files: {conversation.place()} cannot be rendered by {self.origin} "
                f"({first_line(fault)}); repair the messages, or set {KEY} to another template"
            ) from None
        return text


def encode(tokenizer: Tokenizer, rendered: Rendered) -> tuple[Encoded, np.ndarray]:
    """Return a conversation's N tokens, and for each whether it is of the assistants' text: [N] bool."""
    text, answers = rendered
    encoded, spans_N2 = tokenizer.encode_rendered(text)
    begins_N, ends_N = spans_N2.T
    counted_N = np.zeros(len(encoded.ids), bool)
    for begin, end in answers:
        touched = np.flatnonzero((begins_N < end) & ((ends_N > begin) | (begins_N >= begin)))
        if len(touched):
            counted_N[touched[0] : touched[-1] + 1] = True
    return encoded, counted_N


def ends_of_answers(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Return the special token that the template writes at the end of an answer; none if there is no such
    token, or the template refuses two short messages."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        rendered = template.render(Conversation(messages, None, lambda: "a conversation"))
    except ValueError:
        return []
    encoded, counted_N = encode(tokenizer, rendered)
    return [int(token) for token in encoded.ids[counted_N] if token in tokenizer.special][-1:]


def _read(file: Path) -> tuple[str, str]:
    """Return the source of a template, and where it is from."""
    try:
        return file.read_text(encoding="utf-8"), str(file)
    except (OSError, UnicodeDecodeError) as fault:
        reason = getattr(fault, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"{KEY}: cannot read {str(file)!r} ({reason}); give a Jinja file") from None


def _beside_tokenizer(folder: Path | None) -> tuple[str, str]:
    """Return the source of the template in a tokenizer's folder, and where it is from."""
    if folder is None:
        raise ValueError(
            f"{KEY}: data.format=chat needs a chat template, and data.tokenizer={BYTES} has none; set {KEY} "
            f"to a Jinja file, or data.tokenizer to one with a template"
        )
    if (folder / TEMPLATE_FILE).is_file():
        return _read(folder / TEMPLATE_FILE)
    for file in (folder / "chat_template.json", folder / TOKENIZER_CONFIG):
        told = content_of(file).get("chat_template")
        if isinstance(told, list):  # several, by name
            named = {one.get("name"): one.get("template") for one in told if isinstance(one, dict)}
            told = named.get("default")
        if isinstance(told, str):
            return told, str(file)
    raise ValueError(
        f"{KEY}: data.format=chat needs a chat template, and {str(folder)!r} has neither {TEMPLATE_FILE} "
        f"nor the key chat_template in {TOKENIZER_CONFIG}; set {KEY} to a Jinja file"
    )


def _without_marks(marked: str) -> Rendered:
    """Take the marks out of a text; return what lies between them as spans."""
    text, spans, begin = "", list[tuple[int, int]](), 0
    for piece in _SPLIT.split(marked):
        if piece == _MARKS[0]:
            begin = len(text)
        elif piece == _MARKS[1]:
            spans.append((begin, len(text)))
        else:
            text += piece
    return text, spans


@lru_cache(maxsize=8)
def _compiled(source: str, origin: str) -> Any:
    """Compile a template as `transformers` does. Raise `ValueError` if it is none.

    It cannot read the clock (``strftime_now``): the tokens of a data set depend on its files alone.
    """
    from jinja2 import TemplateError, TemplateSyntaxError, nodes  # imported here, because it loads slowly
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationMarks(Extension):
        """Marks what the template writes between ``generation`` and ``endgeneration``."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's way

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Callable[[], str]) -> str:
            return caller().join(_MARKS)

    def refuse(text: str) -> None:
        raise TemplateError(text)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMarks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson  # Jinja's own is for web pages
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as fault:
        raise ValueError(
            f"{KEY}: {origin} is no Jinja template (line {fault.lineno}: {fault.message}); repair it, or "
            f"name another file"
        ) from None
