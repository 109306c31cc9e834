"""The configuration of a run: one YAML file, read safely, checked, frozen.

Every object here is immutable and complete after `load_config`. Errors are `ConfigError`: one message with
the path of the key, its value, and what would be right.
"""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from braid.actors.config.data import DataConfig
from braid.actors.config.machines import ClusterConfig, TelemetryConfig
from braid.actors.config.model import NAME_PATTERN, ConfigError, ModelConfig, Section, as_config_error, clash
from braid.actors.config.paths import BESIDE_THE_FILE, BYTES, anchored, expanded
from braid.actors.config.survival import CheckpointConfig, ElasticConfig, FailureConfig
from braid.actors.config.training import AUTO, OverlapConfig, ParallelConfig, TrainConfig
from braid.actors.config.wording import problems_in
from braid.scheduling.generate.named import ScheduleName
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import AXES, ParallelLayout
from braid.scheduling.model.fit import check_fit
from braid.scheduling.model.recompute import RECOMPUTE_POLICIES, policies_of
from braid.scheduling.model.shape import ModelShape, Workload
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.text.suggestions import nearest
from braid.scheduling.text.yaml_text import parse_yaml, write_yaml

_GIVEN_BY_PLANS: Mapping[str, Iterable[str]] = {
    "parallel": ParallelConfig.model_fields,
    "train": ("micro_batch", "recompute"),
    "overlap": ("schedule", "pipeline"),
}
"""Keys that ``overlap.plan`` sets if the configuration does not."""
_EXTRAS: Iterable[tuple[str, str, str, str, str]] = (
    ("kernels", "triton", "triton", "gpu", "torch"),
    ("optimizer", "adamw_8bit", "torchao", "eight-bit", "adamw"),
)
"""Keys of ``train`` with values that need a package, its extra, and the value to use without."""


class Config(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")] = "run"  # of the run and its folder
    runs: Path = Path("runs")  # the folder of all runs, of prepared data and of profiles
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    overlap: OverlapConfig = OverlapConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    failure: FailureConfig = FailureConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    elastic: ElasticConfig = ElasticConfig()

    @model_validator(mode="after")
    def _sections_fit_each_other(self) -> "Config":
        parallel, train, data = self.parallel, self.train, self.data
        data.check()
        degrees = parallel.tensor_degrees
        if parallel.zero and parallel.replicas == 1 and not parallel.auto and not self.elastic.max_ranks:
            raise clash(self, "parallel.zero", "parallel.dp", "set parallel.dp to 2 or more")
        if parallel.shards and self.elastic.max_ranks:
            raise clash(self, "parallel.shards", "elastic.max_ranks", "set parallel.shards to 0")
        if train.reduce_dtype is not None and train.dtype == "fp64":
            raise clash(self, "train.reduce_dtype", "train.dtype", "set train.reduce_dtype to null")
        if train.reduce_dtype is not None and train.deterministic_reduction:
            raise clash(self, "train.reduce_dtype", "train.deterministic_reduction", "leave one of both out")
        by_layer = degrees not in (None, AUTO), train.recompute not in (AUTO, *RECOMPUTE_POLICIES)
        if (train.recompute == AUTO and by_layer[0]) or (degrees == AUTO and by_layer[1]):
            raise clash(self, "train.recompute", "parallel.tensor_degrees", "set both to auto, or give both")
        profiled = self.telemetry.profile.steps
        if profiled is not None and profiled[1] > train.steps:
            raise clash(
                self, "telemetry.profile.steps", "train.steps", "profile earlier, or raise train.steps"
            )
        if self.checkpoint.keep_best and not (train.validate_every and data.validates):
            other = "data.validation_fraction" if train.validate_every else "train.validate_every"
            raise clash(self, "checkpoint.keep_best", other, f"set {other} above 0, or keep_best to false")
        if self.model.lora is not None and train.optimizer != "adamw":
            raise clash(self, "train.optimizer", "model.lora", "set train.optimizer to adamw")
        return self

    @property
    def run_directory(self) -> Path:
        """The run's directory, ``runs/NAME``."""
        return self.runs / self.name

    @property
    def row_tokens(self) -> int:
        """Number of tokens of a row of training data; 0: the data are a stream."""
        rows = self.data.packing == "whole" or self.data.format == "chat"
        return self.model.sequence + 1 if rows else 0

    @property
    def tokenizer(self) -> str:
        """The value of ``data.tokenizer``, or its default."""
        return self.data.tokenizer or (BYTES if self.model.initial is None else str(self.model.initial))

    def with_schedule(self, name: str) -> "Config":
        """Return a copy with another schedule, given by its text (`ScheduleName`)."""
        named = ScheduleName.parse(name)
        return self.changed(overlap={"schedule": named.schedule, "pipeline": named.point or None})

    def changed(self, **sections: Mapping[str, Any]) -> "Config":
        """Return a copy with other values, which are not checked: ``config.changed(train={"steps": 5})``."""
        copies = {name: getattr(self, name).model_copy(update=keys) for name, keys in sections.items()}
        return self.model_copy(update=copies)

    @as_config_error()
    def layout(self) -> ParallelLayout:
        """Return the mesh, with the model's chunks placed as the schedule requires."""
        parallel = self.parallel
        if parallel.auto:
            raise ConfigError(
                "parallel: auto is decided when a run starts, or by `braid plan`; set the degrees here"
            )
        degrees = parallel.tensor_degrees
        return ParallelLayout(
            **{key: getattr(parallel, key) for key in (*AXES, "ep", "zero", "shards")},
            tensor_degrees=() if degrees is None or degrees == AUTO else degrees,
            placement=self.overlap.name.placement_on(parallel.pp),
        )

    @as_config_error()
    def sizes(self, shape: ModelShape, streams: Mapping[str, Stream] | None = None) -> PartSizes:
        """Return the sizes of the model's parts on one rank; ``streams``: the stream of each axis, by default
        inside the node."""
        train, context = self.train, self.parallel.context
        return PartSizes(shape, self.layout(), train.micro_batch, streams, context, self.recompute)

    @property
    def chooses_layers(self) -> bool:
        """Whether degrees or policies of layers are chosen when a run starts, or by `braid plan`."""
        return AUTO in (self.parallel.tensor_degrees, self.train.recompute)

    @property
    def recompute(self) -> str:
        """The value of ``train.recompute``, or "none" if it is "auto" and the planner has not chosen yet."""
        return "none" if self.train.recompute == AUTO else self.train.recompute

    def workload(self) -> Workload:
        return Workload(global_batch=self.train.global_batch, micro_batch=self.train.micro_batch)

    def shape(self, vocabulary: int) -> ModelShape:
        """Return the model's sizes, including the data's attention mask and the regularisation of training;
        ``vocabulary`` is the tokenizer's."""
        train = self.train
        return replace(
            self.model.shape(vocabulary),
            documents=self.data.document_mask,
            dropout=train.dropout,
            label_smoothing=train.label_smoothing,
            logit_z_loss=train.z_loss,
        )

    @as_config_error()
    def check(self, vocabulary: int) -> ModelShape:
        """Return the model's shape, after checking that model, layout and batch fit each other."""
        shape = self.shape(vocabulary)
        policies_of(self.recompute, shape.layers)
        if self.parallel.auto:  # layouts are checked as they are tried
            return shape
        check_fit(shape, self.layout(), self.workload())
        profile, ranks = self.telemetry.profile, self.layout().ranks
        if profile.steps is not None and max(profile.ranks) >= ranks:
            raise ConfigError(
                f"telemetry.profile.ranks={list(profile.ranks)} names a rank that is not there: the layout "
                f"has ranks 0 to {ranks - 1}"
            )
        # Whether a rank has a device for Triton's kernels, the rank checks.
        if self.train.kernels == "triton" and self.train.dtype == "fp64":
            raise clash(self, "train.kernels", "train.dtype", "set train.kernels to torch")
        for key, value, package, extra, other in _EXTRAS:
            if getattr(self.train, key) == value and importlib.util.find_spec(package) is None:
                missing = f"{package} is not installed (the extra braid[{extra}]); install it, or use {other}"
                raise ConfigError(f"train.{key}={value!r}: {missing}")
        if self.overlap.cuda_graphs is True and shape.documents:
            raise clash(self, "overlap.cuda_graphs", "data.document_mask", "set one of both to false")
        if self.overlap.cuda_graphs is True and self.cluster.device == "cpu":
            raise clash(self, "overlap.cuda_graphs", "cluster.device", "set cluster.device to auto")
        return shape

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML, which `load_config` can read."""
        content = self.model_dump(mode="json")
        if self.model.preset is not None or self.model.initial is not None:
            # Defaults written out would be sizes that the configuration gives, against the preset's.
            content["model"] = self.model.model_dump(mode="json", exclude_unset=True)
        for name, keys in _GIVEN_BY_PLANS.items() if self.overlap.plan is not None else ():
            for key in set(keys) - getattr(self, name).model_fields_set:
                del content[name][key]  # written out, it would be said against the plan's
        return write_yaml(content)


def load_config(path: Path | str, overrides: Iterable[str] = ()) -> Config:
    """Read a configuration file and apply ``section.key=value`` overrides.

    ``~`` and ``$NAME`` in paths are expanded. Relative paths of `BESIDE_THE_FILE`, in the file and in
    overrides, are resolved from the file's folder. Other relative paths stay as they are: they begin in the
    folder in which a run is started.
    """
    config = expanded(parse_config(read_content(Path(path)), overrides, source=str(path)))
    return anchored(config, Path(path).parent.absolute(), BESIDE_THE_FILE)


def parse_config(
    content: Mapping[str, Any], overrides: Iterable[str] = (), source: str = "configuration"
) -> Config:
    """Check a configuration that is already in memory; its paths stay as they are."""
    merged, overrides = dict(content), list(overrides)
    for override in overrides:
        _override(merged, override)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        problems = problems_in(error.errors(), Config).items()
        lines = [f"{_origin(key, problem, overrides) or source}: {problem}" for key, problem in problems]
        raise ConfigError("\n".join(lines)) from None


def _origin(key: str, problem: str, overrides: Sequence[str]) -> str:
    """Return the override of the faulty ``key``, or of another one that the problem names; empty if there is
    none."""
    for override in reversed(overrides):
        name = override.partition("=")[0]
        named = f"{name.removeprefix(f'{key}.')}=" in problem
        unknown = problem.startswith("unknown") and name.startswith(f"{key}.")
        if named or unknown or key == name or key.startswith((f"{name}.", f"{name}[")):
            return f"override {override!r}"
    return ""


@as_config_error()
def read_content(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; raise `ConfigError` if there is none."""
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        files = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = nearest(path.name, files)
        remedy = f"did you mean {path.parent / near}?" if near else "give the path of a run's YAML file"
        raise ConfigError(f"configuration file {path} does not exist; {remedy}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give the path of a run's YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"{path} must hold keys and values, found a {type(content).__name__}")
    return content or {}


@as_config_error()
def _override(content: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} must be written key=value, such as 'train.lr=3e-4'")
    *sections, last = key.split(".")
    for number, section in enumerate(sections, start=1):
        inner, path = content.get(section), ".".join(sections[:number])
        if isinstance(inner, list):
            raise ConfigError(
                f"override {override!r}: {path} is a list, whose entries cannot be set one by one; give the "
                f"whole list, or edit the file"
            )
        if not isinstance(inner, dict | None):
            whole = f"'{path}={{{last}: {text}}}'"
            raise ConfigError(
                f"override {override!r}: {path} is {inner!r}, without keys; give override {whole}"
            )
        content[section] = content = dict(inner or {})
    content[last] = parse_yaml(text, f"override {override!r}: the value")
