"""The parts of KubeRay's resources that are used, as strict models: any other key or type is an error.

Written down by hand after the published API ``ray.io/v1`` (RayJobSpec, RayClusterSpec, HeadGroupSpec,
WorkerGroupSpec, AutoscalerOptions; AuthOptions is there since KubeRay 1.5, its ``secretName`` since 1.6) and
Kubernetes' ``v1`` (PodSpec, ConfigMap). Names and types were compared with the operator's own
``rayjob_types.go`` (commit f6ef3f7) and ``raycluster_types.go`` (3275ee0) under ``ray-operator/apis/ray/v1``:
all agree but ``authOptions`` and ``autoscalerOptions.version``, which are younger than these.
"""
# ruff: noqa: N815

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Quantity = Annotated[str, Field(pattern=r"^[1-9]\d*(m|Mi|Gi|Ti)?$")]
Absolute = Annotated[str, Field(pattern=r"^/")]
Count = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Meta(Strict):
    name: Name
    namespace: Name | None = None
    labels: dict[str, str]


class Resources(Strict):
    requests: dict[Literal["cpu", "memory", "nvidia.com/gpu"], Quantity]
    limits: dict[Literal["cpu", "memory", "nvidia.com/gpu"], Quantity]

    @model_validator(mode="after")
    def _gpus_are_the_same_in_both(self) -> "Resources":
        assert self.requests.get("nvidia.com/gpu") == self.limits.get("nvidia.com/gpu")
        return self


class Port(Strict):
    name: str = Field(pattern=r"^[a-z-]{1,15}$")
    containerPort: int = Field(gt=0, lt=65536)


class Mount(Strict):
    name: Name
    mountPath: Absolute
    readOnly: bool = False


class Container(Strict):
    name: Name
    image: str = Field(min_length=1)
    resources: Resources
    ports: list[Port] = []
    volumeMounts: list[Mount]


class Volume(Strict):
    name: Name
    persistentVolumeClaim: dict[Literal["claimName"], Name] | None = None
    configMap: dict[Literal["name"], Name] | None = None
    emptyDir: dict[Literal["medium"], Literal["Memory"]] | None = None

    @model_validator(mode="after")
    def _of_one_kind(self) -> "Volume":
        assert len(self.model_fields_set) == 2
        return self


class PodSpec(Strict):
    terminationGracePeriodSeconds: Count
    containers: list[Container] = Field(min_length=1)
    volumes: list[Volume]

    @model_validator(mode="after")
    def _every_mount_has_its_volume(self) -> "PodSpec":
        names = {volume.name for volume in self.volumes}
        assert {mount.name for container in self.containers for mount in container.volumeMounts} == names
        return self


class Pod(Strict):
    spec: PodSpec


class HeadGroup(Strict):
    serviceType: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    rayStartParams: dict[str, str]
    template: Pod


class WorkerGroup(Strict):
    groupName: Name
    replicas: Count
    minReplicas: Count
    maxReplicas: Count
    rayStartParams: dict[str, str]
    template: Pod

    @model_validator(mode="after")
    def _ordered(self) -> "WorkerGroup":
        assert self.minReplicas <= self.replicas <= self.maxReplicas
        return self


class Autoscaler(Strict):
    version: Literal["v1", "v2"]
    upscalingMode: Literal["Default", "Aggressive", "Conservative"]
    idleTimeoutSeconds: Count


class Auth(Strict):
    mode: Literal["disabled", "token"]
    secretName: Name | None = None


class ClusterSpec(Strict):
    rayVersion: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    authOptions: Auth
    enableInTreeAutoscaling: bool
    autoscalerOptions: Autoscaler
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup] = Field(min_length=1)


class JobSpec(Strict):
    entrypoint: str = Field(min_length=1)
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]
    runtimeEnvYAML: str
    backoffLimit: Count
    shutdownAfterJobFinishes: bool
    ttlSecondsAfterFinished: Count
    rayClusterSpec: ClusterSpec


class ConfigMap(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["ConfigMap"]
    metadata: Meta
    data: dict[str, str]


class JobMeta(Meta):
    name: Annotated[Name, Field(max_length=47)]


class RayJob(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: JobMeta
    spec: JobSpec


class RayCluster(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Meta
    spec: ClusterSpec


def check(documents: list[Any]) -> tuple[ConfigMap, RayJob | RayCluster]:
    """The two documents of a manifest, or pydantic's `ValidationError`."""
    first, second = documents
    kind = RayJob if second["kind"] == "RayJob" else RayCluster
    return ConfigMap.model_validate(first), kind.model_validate(second)
