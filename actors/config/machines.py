"""Defines the configuration of where a run's ranks are, and of what is recorded while they train."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from braid.actors.config.model import Above0, Count, Positive, Section, clash
from braid.actors.config.paths import checked_address
from braid.actors.config.variables import check_variables


class NcclLimits(Section):
    """How many of a GPU's multiprocessors the kernels of an axis may take; by default NCCL decides."""

    # thread blocks of a collective at most: fewer leave compute beside it more multiprocessors
    max_ctas: Positive | None = None


class MessageLimits(NcclLimits):
    """The same of messages between stages: receives are asked for early and spin until they are served."""

    max_ctas: Positive | None = 2  # enough for a message


class NcclConfig(Section):
    """Limits by axis: collectives of layers (tp), messages between stages (pp), sums of gradients (dp)."""

    tp: NcclLimits = NcclLimits()
    pp: MessageLimits = MessageLimits()
    dp: NcclLimits = NcclLimits()


class ClusterConfig(Section):
    """Where ranks run."""

    launcher: Literal["ray", "processes"] = "ray"  # Ray actors, or plain processes of this machine
    address: str | None = None  # of a Ray cluster; default: $RAY_ADDRESS, else a private local one
    allow_unauthenticated: bool = False  # join a cluster beyond loopback that takes orders without a token
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: GPUs where there are any
    backend: Literal["auto", "gloo", "nccl"] = "auto"  # of process groups; auto: NCCL on GPUs, else gloo
    cpus_per_rank: Above0 = 1.0  # CPUs reserved for a rank; less than 1 to crowd ranks
    threads_per_rank: Positive = 1  # CPU threads that a rank computes with
    memory_gb: Above0 | None = None  # that plans may fill of a rank; null: whatever it takes
    peak_tflops: Above0 | None = None  # of a rank; with it MFU is reported
    spread: bool = False  # a rank of each node in turn, rather than as many as fit on one
    nccl: NcclConfig = NcclConfig()
    # environment variables of the ranks' processes, such as NCCL_SOCKET_IFNAME; null, for secrets: the value
    # in the environment of the run's command
    env: Annotated[dict[str, str | None], BeforeValidator(check_variables)] = Field(default_factory=dict)
    placement_timeout_s: Above0 = 30.0  # for room for all ranks
    group_timeout_s: Above0 = 120.0  # for ranks to meet, and for one collective
    # each connection between ranks sends at this rate at most, as if hosts were joined by a slow link: to see
    # on one machine what hiding communication is worth (Linux, CPU)
    emulated_link_mbit: Annotated[float, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _paced(self) -> "ClusterConfig":
        if self.emulated_link_mbit is not None and self.device == "cuda":
            raise clash(self, "emulated_link_mbit", "device", "set device to cpu")
        return self


class WandbConfig(Section):
    """A run of Weights & Biases beside this one; ``wandb: online`` is short for ``wandb: {mode: online}``."""

    mode: Literal["off", "offline", "online"] = "off"  # offline: kept in runs/NAME/wandb, for `wandb sync`
    project: str = "braid"  # where the run appears
    entity: str | None = None  # user or team; default: that of the key
    group: str | None = None  # of runs that belong together
    tags: tuple[str, ...] = ()  # to find it by

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, content: Any) -> Any:
        """Accept the mode as a word; YAML 1.1 reads ``off`` as ``false``."""
        if content is False:
            return {}
        return {"mode": content} if isinstance(content, str) else content


class ProfileConfig(Section):
    """Steps that `torch.profiler` records, as Chrome traces in runs/NAME/profile."""

    steps: tuple[Positive, Positive] | None = None  # the first and the last, counted from 1; null: none
    ranks: tuple[Count, ...] = (0,)  # the ranks that are recorded

    @model_validator(mode="after")
    def _ordered(self) -> "ProfileConfig":
        if self.steps is not None and self.steps[0] > self.steps[1]:
            first, last = self.steps
            raise ValueError(
                f"steps=[{first}, {last}] names the last step first; set it to [{last}, {first}]"
            )
        if not self.ranks:
            raise ValueError("ranks=[] names no rank; set it to [0], or steps to null")
        return self


class MlflowConfig(Section):
    """A run of MLflow beside this one, with its configuration and its numbers."""

    uri: str | None = None  # of the tracking server, http://HOST:PORT, or a folder, file:FOLDER; null: none
    experiment: str = "braid"  # where the run appears; made if it is not there

    @field_validator("uri")
    @classmethod
    def _checked(cls, uri: str | None) -> str | None:
        schemes = ("http", "https", "file", "sqlite", "databricks")
        user = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
        return None if uri is None else checked_address(uri, schemes, user)


_EVENT = Literal["start", "failure", "checkpoint", "end"]


class WebhookConfig(Section):
    """An address that is told what happens to the run, by a POST of JSON."""

    # http:// or https://; $NAME: the value of that environment variable, for addresses that are secret
    url: str | None = None
    events: tuple[_EVENT, ...] = get_args(_EVENT)  # that are told

    @field_validator("url")
    @classmethod
    def _checked(cls, url: str | None) -> str | None:
        return url if url is None or url.startswith("$") else checked_address(url, ("http", "https"))


class TelemetryConfig(Section):
    """What is written down while training."""

    progress: bool = True  # bars and a line per step in the terminal
    spans: bool = True  # begin and end of every operator; without them there are no numbers of overlap
    trace_mb_per_rank: Positive = 64  # disk for the spans of the latest steps; older ones are removed
    tensorboard: bool = False  # also event files in runs/NAME/tensorboard
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    webhook: WebhookConfig = WebhookConfig()
    profile: ProfileConfig = ProfileConfig()
    page: bool = True  # the live page of the run, on this machine's loopback
    page_port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: a free one
