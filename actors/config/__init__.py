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
from braid.actors.config.model import NAME_PATTERN, ConfigError, ModelConfig, Section, as_config_error
from braid.actors.config.paths import BESIDE_THE_FILE, BYTES, anchored, expanded
from braid.actors.config.survival import CheckpointConfig, ElasticConfig, FailureConfig
from braid.actors.config.training import AUTO, OverlapConfig, ParallelConfig, TrainConfig
from braid.actors.config.wording import problems_in, section_of
from braid.scheduling.generate.named import ScheduleName
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import AXES, ParallelLayout
from braid.scheduling.model.fit import check_fit, check_runnable
from braid.scheduling.model.recompute import RECOMPUTE_POLICIES, policies_of
from braid.scheduling.model.shape import ModelShape, Workload
from braid.scheduling.model.sizes import PartSizes, part_sizes
from braid.scheduling.text.suggestions import nearest
from braid.scheduling.text.yaml_text import parse_yaml, write_yaml

_GIVEN_BY_PLANS: Mapping[str, Iterable[str]] = {
    "parallel": ParallelConfig.model_fields,
    "train": ("micro_batch", "recompute"),
    "overlap": ("schedule", "pipeline"),
}
"""Keys that ``overlap.plan`` sets if the configuration does not."""


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
            raise ValueError(
                f"parallel.zero={parallel.zero} cuts states over the ranks that share parameters, and with "
                f"parallel.dp=1 there is one; set parallel.zero to 0, or parallel.dp to 2 or more"
            )
        if parallel.shards and self.elastic.max_ranks:
            raise ValueError(
                f"parallel.shards={parallel.shards} does not go with elastic.max_ranks, which changes the "
                f"number of replicas; set parallel.shards to 0"
            )
        if train.reduce_dtype is not None and train.dtype == "fp64":
            raise ValueError(
                f"train.reduce_dtype={train.reduce_dtype} would round sums of train.dtype=fp64; set "
                f"train.reduce_dtype to null, or train.dtype to fp32 or bf16"
            )
        if train.reduce_dtype is not None and train.deterministic_reduction:
            raise ValueError(
                f"train.reduce_dtype={train.reduce_dtype} rounds what train.deterministic_reduction=true "
                f"sums exactly; set train.reduce_dtype to null, or train.deterministic_reduction to false"
            )
        if train.recompute == AUTO and degrees not in (None, AUTO):
            raise ValueError(
                f"parallel.tensor_degrees={degrees} is given layer by layer, and train.recompute=auto; set "
                f"both to auto, or give both"
            )
        if degrees == AUTO and train.recompute not in (AUTO, *RECOMPUTE_POLICIES):
            raise ValueError(
                f"train.recompute={train.recompute!r} is given layer by layer, and "
                f"parallel.tensor_degrees=auto; set both to auto, or give both"
            )
        profiled = self.telemetry.profile.steps
        if profiled is not None and profiled[1] > train.steps:
            raise ValueError(
                f"telemetry.profile.steps={list(profiled)} end after train.steps={train.steps}; lower "
                f"them, or raise train.steps"
            )
        if self.checkpoint.keep_best and not (train.validate_every and data.validates):
            raise ValueError(
                f"checkpoint.keep_best=true compares validations, and train.validate_every="
                f"{train.validate_every}, data.validation_fraction={data.validation_fraction:g}; set both "
                f"above 0, or checkpoint.keep_best to false"
            )
        if self.model.lora is not None and train.optimizer != "adamw":
            raise ValueError(
                f"train.optimizer={train.optimizer!r} is for whole matrices, and model.lora trains adapters; "
                f"set train.optimizer to adamw, or leave model.lora out"
            )
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
        return part_sizes(shape, self.layout(), train.micro_batch, streams, context, self.recompute)

    @property
    def chooses_layers(self) -> bool:
        """Whether degrees or policies of layers are chosen when a run starts, or by `braid plan`."""
        return AUTO in (self.parallel.tensor_degrees, self.train.recompute)

    @property
    def recompute(self) -> str:
        """The value of ``train.recompute``; none until it is chosen."""
        return "none" if self.train.recompute == AUTO else self.train.recompute

    def workload(self) -> Workload:
        """Return the batch sizes."""
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
        check_runnable(shape, self.layout())
        check_fit(shape, self.layout(), self.workload())
        profile, ranks = self.telemetry.profile, self.layout().ranks
        if profile.steps is not None and max(profile.ranks) >= ranks:
            raise ConfigError(
                f"telemetry.profile.ranks={list(profile.ranks)} names a rank that is not there: the layout "
                f"has ranks 0 to {ranks - 1}"
            )
        # Whether a rank has a device for Triton's kernels, the rank checks.
        if self.train.kernels == "triton" and self.train.dtype == "fp64":
            raise ConfigError(
                "train.kernels='triton' computes in fp32 and bf16, not in train.dtype='fp64'; use torch"
            )
        if self.train.kernels == "triton" and importlib.util.find_spec("triton") is None:
            raise ConfigError(
                "train.kernels='triton': Triton is not installed (the extra braid[gpu]); use auto or torch"
            )
        if self.train.optimizer == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                "train.optimizer='adamw_8bit': torchao is not installed (the extra braid[eight-bit]); "
                "install it, or use adamw"
            )
        if self.overlap.cuda_graphs is True and shape.documents:
            raise ConfigError(
                "overlap.cuda_graphs=true does not go with data.document_mask, as every micro-batch has "
                "other documents; set one of both to false"
            )
        if self.overlap.cuda_graphs is True and self.cluster.device == "cpu":
            raise ConfigError(
                "overlap.cuda_graphs=true needs GPUs, and cluster.device is cpu; set it to auto"
            )
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
    sections = {name for name, info in Config.model_fields.items() if section_of(info.annotation)}
    merged = {key: value for key, value in content.items() if value is not None or key not in sections}
    overrides = list(overrides)
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
