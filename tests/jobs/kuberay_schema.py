"""The parts of KubeRay's resources that are used, as strict models: any other key or type is an error.

Written down by hand after the published API ``ray.io/v1`` (RayJobSpec, RayClusterSpec, HeadGroupSpec,
WorkerGroupSpec, AutoscalerOptions; AuthOptions is there since KubeRay 1.5, its ``secretName`` since 1.6) and
Kubernetes' ``v1`` (PodSpec, ConfigMap). Names and types were compared with the operator's own
``rayjob_types.go`` (commit f6ef3f7) and ``raycluster_types.go`` (3275ee0) under ``ray-operator/apis/ray/v1``:
all agree but ``authOptions`` and ``autoscalerOptions.version``, which are younger than these.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Quantity = Annotated[str, Field(pattern=r"^[1-9]\d*(m|Mi|Gi|Ti)?$")]
Absolute = Annotated[str, Field(pattern=r"^/")]


class Strict(BaseModel):
    """Refuses keys that it does not know, and values of other types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Meta(Strict):
    """``ObjectMeta``."""

    name: Name
    namespace: Name | None = None
    labels: dict[str, str]


class Resources(Strict):
    """``ResourceRequirements``; GPUs have to be the same in both."""

    requests: dict[Literal["cpu", "memory", "nvidia.com/gpu"], Quantity]
    limits: dict[Literal["cpu", "memory", "nvidia.com/gpu"], Quantity]

    @model_validator(mode="after")
    def _equal(self) -> "Resources":
        assert self.requests.get("nvidia.com/gpu") == self.limits.get("nvidia.com/gpu")
        return self


class Port(Strict):
    """``ContainerPort``; names have at most 15 characters."""

    name: str = Field(pattern=r"^[a-z-]{1,15}$")
    containerPort: int = Field(gt=0, lt=65536)  # noqa: N815


class Mount(Strict):
    """``VolumeMount``."""

    name: Name
    mountPath: Absolute  # noqa: N815
    readOnly: bool = False  # noqa: N815


class Container(Strict):
    """``Container``."""

    name: Name
    image: str = Field(min_length=1)
    resources: Resources
    ports: list[Port] = []
    volumeMounts: list[Mount]  # noqa: N815


class Volume(Strict):
    """``Volume``, of exactly one kind."""

    name: Name
    persistentVolumeClaim: dict[Literal["claimName"], Name] | None = None  # noqa: N815
    configMap: dict[Literal["name"], Name] | None = None  # noqa: N815
    emptyDir: dict[Literal["medium"], Literal["Memory"]] | None = None  # noqa: N815

    @model_validator(mode="after")
    def _one(self) -> "Volume":
        assert len(self.model_fields_set) == 2
        return self


class PodSpec(Strict):
    """``PodSpec``; every mount needs its volume."""

    terminationGracePeriodSeconds: int = Field(ge=0)  # noqa: N815
    containers: list[Container] = Field(min_length=1)
    volumes: list[Volume]

    @model_validator(mode="after")
    def _mounted(self) -> "PodSpec":
        names = {volume.name for volume in self.volumes}
        assert {mount.name for container in self.containers for mount in container.volumeMounts} == names
        return self


class Pod(Strict):
    """``PodTemplateSpec``."""

    spec: PodSpec


class HeadGroup(Strict):
    """``HeadGroupSpec``; parameters of ``ray start`` are strings."""

    serviceType: Literal["ClusterIP", "NodePort", "LoadBalancer"]  # noqa: N815
    rayStartParams: dict[str, str]  # noqa: N815
    template: Pod


class WorkerGroup(Strict):
    """``WorkerGroupSpec``."""

    groupName: Name  # noqa: N815
    replicas: int = Field(ge=0)
    minReplicas: int = Field(ge=0)  # noqa: N815
    maxReplicas: int = Field(ge=0)  # noqa: N815
    rayStartParams: dict[str, str]  # noqa: N815
    template: Pod

    @model_validator(mode="after")
    def _ordered(self) -> "WorkerGroup":
        assert self.minReplicas <= self.replicas <= self.maxReplicas
        return self


class Autoscaler(Strict):
    """``AutoscalerOptions``."""

    version: Literal["v1", "v2"]
    upscalingMode: Literal["Default", "Aggressive", "Conservative"]  # noqa: N815
    idleTimeoutSeconds: int = Field(ge=0)  # noqa: N815


class Auth(Strict):
    """``AuthOptions``."""

    mode: Literal["disabled", "token"]
    secretName: Name | None = None  # noqa: N815


class ClusterSpec(Strict):
    """``RayClusterSpec``."""

    rayVersion: str = Field(pattern=r"^\d+\.\d+\.\d+$")  # noqa: N815
    authOptions: Auth  # noqa: N815
    enableInTreeAutoscaling: bool  # noqa: N815
    autoscalerOptions: Autoscaler  # noqa: N815
    headGroupSpec: HeadGroup  # noqa: N815
    workerGroupSpecs: list[WorkerGroup] = Field(min_length=1)  # noqa: N815


class JobSpec(Strict):
    """``RayJobSpec``; a cluster is only shut down after the job if it was made for it."""

    entrypoint: str = Field(min_length=1)
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]  # noqa: N815
    runtimeEnvYAML: str  # noqa: N815
    backoffLimit: int = Field(ge=0)  # noqa: N815
    shutdownAfterJobFinishes: bool  # noqa: N815
    ttlSecondsAfterFinished: int = Field(ge=0)  # noqa: N815
    rayClusterSpec: ClusterSpec  # noqa: N815


class ConfigMap(Strict):
    """``ConfigMap``."""

    apiVersion: Literal["v1"]  # noqa: N815
    kind: Literal["ConfigMap"]
    metadata: Meta
    data: dict[str, str]


class RayJob(Strict):
    """``RayJob``; its name has at most 47 characters."""

    apiVersion: Literal["ray.io/v1"]  # noqa: N815
    kind: Literal["RayJob"]
    metadata: Meta
    spec: JobSpec

    @model_validator(mode="after")
    def _short(self) -> "RayJob":
        assert len(self.metadata.name) <= 47
        return self


class RayCluster(Strict):
    """``RayCluster``."""

    apiVersion: Literal["ray.io/v1"]  # noqa: N815
    kind: Literal["RayCluster"]
    metadata: Meta
    spec: ClusterSpec


def check(documents: list[Any]) -> tuple[ConfigMap, RayJob | RayCluster]:
    """The two documents of a manifest, or pydantic's `ValidationError`."""
    first, second = documents
    kinds: dict[str, type[RayJob] | type[RayCluster]] = {"RayJob": RayJob, "RayCluster": RayCluster}
    return ConfigMap.model_validate(first), kinds[second["kind"]].model_validate(second)
