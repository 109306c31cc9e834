"""The data's section of the configuration: files, a data set of the Hub, or a mixture of sets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from braid.actors.config.model import NAME_PATTERN, Above0, Section
from braid.actors.config.paths import PYTHON_STDLIB

Format = Literal["auto", "text", "jsonl", "parquet", "megatron", "chat"]
Errors = Literal["strict", "replace", "skip"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class HubConfig(Section):
    """A data set of the Hugging Face Hub, or a folder, that the library `datasets` reads (braid[hub])."""

    id: str  # a name on the Hub, such as allenai/c4; or a folder here, whose path begins with / or .
    subset: str | None = None  # the configuration of a data set that has several
    split: str = "train"  # also a part of a split, such as train[:1%], if it is not streamed
    column: str = "text"  # where the text is
    streaming: bool = False  # read while it is tokenised: nothing is downloaded first


class SetConfig(Section):
    """A set of ``data.mixture``. Keys that a set leaves out have the values of ``data``."""

    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]  # names its loss; a part of its samples' order
    weight: Above0  # its part of all samples, over the sum of the weights
    files: tuple[str, ...] = ()  # as data.files
    hub: HubConfig | None = None  # as data.hub, in place of files
    exclude: tuple[str, ...] | None = None  # as data.exclude
    format: Format | None = None  # as data.format
    text_field: str | None = None  # as data.text_field
    encoding_errors: Errors | None = None  # as data.encoding_errors
    validation_fraction: Fraction | None = None  # as data.validation_fraction
    chat_template: Path | None = None  # as data.chat_template

    @model_validator(mode="after")
    def _has_a_source(self) -> "SetConfig":
        if bool(self.files) == (self.hub is not None):
            what = "both files and hub" if self.files else "neither files nor hub"
            raise ValueError(f"set {self.name!r} has {what}; give one of them")
        return self


class DataConfig(Section):
    """The corpus. `PYTHON_STDLIB` among the files stands for the sources of Python's standard library."""

    # paths, patterns or URLs; python-stdlib: Python's sources
    files: tuple[str, ...] = (PYTHON_STDLIB,)
    hub: HubConfig | None = None  # in place of files
    mixture: tuple[SetConfig, ...] = ()  # in place of files: sets with weights
    exclude: tuple[str, ...] = ()  # patterns of files to leave out
    # auto: by the ending of each file; megatron: tokens in pairs of .bin and .idx; chat: messages in JSON
    # lines or Parquet, loss on assistants' only
    format: Format = "auto"
    # stream: documents end to end; whole: documents in rows, uncut; default: stream, for format chat whole
    packing: Literal["stream", "whole"] | None = None
    chat_template: Path | None = None  # a Jinja file for format chat; default: that beside the tokenizer
    # bytes, or a Hugging Face tokenizer.json, its folder, or its name on the Hub (org/name); default: that of
    # model.initial, else bytes
    tokenizer: str | None = None
    end_token: str | None = None  # ends documents; default: what the files beside the tokenizer say
    text_field: str = "text"  # of JSON lines and Parquet: where the text is
    encoding_errors: Errors = "strict"  # of files that are no UTF-8
    validation_fraction: Fraction = 0.02  # of documents, kept from training
    directory: Path | None = None  # where tokens go; default: <runs>/data/<fingerprint>
    document_mask: bool = False  # tokens attend to those of their own document only
    restart_positions: bool = False  # count positions from the begin of each document, with document_mask

    @model_validator(mode="before")
    @classmethod
    def _no_default_files_beside_others(cls, content: Any) -> Any:
        others = isinstance(content, Mapping) and (content.get("hub") or content.get("mixture"))
        return {"files": (), **content} if others else content

    @property
    def sets(self) -> dict[str, "DataConfig"]:
        """Configurations of the sets by name, each as of a run on that set alone; this one without a name if
        there is no mixture."""
        if not self.mixture:
            return {"": self}
        given = {entry.name: entry.model_dump(exclude={"name", "weight", "hub"}) for entry in self.mixture}
        return {
            entry.name: self.model_copy(
                update={
                    **{key: value for key, value in given[entry.name].items() if value is not None},
                    "hub": entry.hub,
                    "mixture": (),
                    "directory": self.directory and self.directory / entry.name,
                }
            )
            for entry in self.mixture
        }

    @property
    def validates(self) -> bool:
        """Whether documents are kept from training, of any set."""
        return any(data.validation_fraction > 0 for data in self.sets.values())

    def check(self) -> None:
        """Raise `ValueError` for keys that exclude each other."""
        names = [entry.name for entry in self.mixture]
        if double := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"data.mixture has two sets with the name {double!r}; rename one of them")
        others = [key for key in ("hub", "mixture") if getattr(self, key)]
        if self.files and others:
            raise ValueError(
                f"data.files={list(self.files)} does not go with data.{others[0]}; leave data.files out, or "
                f"give the files to a set of data.mixture"
            )
        formats = {data.format for data in self.sets.values()}
        if "chat" in formats and self.packing == "stream":
            raise ValueError("data.packing='stream' does not go with data.format='chat'; set it to whole")
        if self.chat_template is not None and "chat" not in formats:
            raise ValueError(f"data.chat_template needs data.format=chat, found {self.format!r}; set it")
        if self.restart_positions and not self.document_mask:
            raise ValueError("data.restart_positions=true needs data.document_mask=true; set both, or none")
        if len(others) > 1:
            raise ValueError("data.hub does not go with data.mixture; give it to a set of data.mixture")
        for name, data in self.sets.items():
            where = f"data.mixture, set {name!r}: " if name else "data."
            if data.hub is None:
                continue
            if data.format != "auto":
                raise ValueError(
                    f"{where}format={data.format} is for files, and hub reads a column; set format to auto"
                )
            if data.hub.streaming and "[" in data.hub.split:
                raise ValueError(
                    f"{where}hub.split={data.hub.split!r} is a part of a split, which cannot be streamed; "
                    f"set hub.streaming to false, or take a whole split"
                )
