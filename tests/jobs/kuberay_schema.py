"""The parts of KubeRay's resources that are used, as strict models: any other key or type is an error.

Written down by hand after the published API ``ray.io/v1`` (RayJobSpec, RayClusterSpec, HeadGroupSpec,
WorkerGroupSpec, AutoscalerOptions; AuthOptions is there since KubeRay 1.5, its ``secretName`` since 1.6) and
Kubernetes' ``v1`` (PodSpec, ConfigMap). Names and types were compared with the operator's own
``rayjob_types.go`` (commit f6ef3f7) and ``raycluster_types.go`` (3275ee0) under ``ray-operator/apis/ray/v1``:
all agree but ``authOptions`` and ``autoscalerOptions.version``, which are younger than these.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from tests.strict_models import Count, Text, each, matching, model, one_of, some

NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
Name = matching(NAME, max_length=63)
Absolute = matching(r"^/")


def checked(kind: Any, check: Any) -> Any:
    """Values of which more is asked than each field by itself."""

    def assure(value: Any) -> Any:
        assert check(value)
        return value

    return Annotated[kind, AfterValidator(assure)]


def meta(longest: int) -> Any:
    name = matching(NAME, max_length=longest)
    return model(name=name, labels=dict[str, str])


Amounts = dict[one_of("cpu memory nvidia.com/gpu"), matching(r"^[1-9]\d*(m|Mi|Gi|Ti)?$")]
GPUS = "nvidia.com/gpu"
Resources = checked(
    model(**each(Amounts, "requests limits")), lambda one: one.requests.get(GPUS) == one.limits.get(GPUS)
)
Port = model(name=matching(r"^[a-z-]{1,15}$"), containerPort=Annotated[int, Field(gt=0, lt=65536)])
Mount = model(name=Name, mountPath=Absolute, optional={"readOnly": bool})
Container = model(
    name=Name, image=Text, resources=Resources, volumeMounts=list[Mount], optional={"ports": list[Port]}
)
KINDS = {
    "persistentVolumeClaim": dict[Literal["claimName"], Name] | None,
    "configMap": dict[Literal["name"], Name] | None,
    "emptyDir": dict[Literal["medium"], Literal["Memory"]] | None,
}
Volume = checked(model(name=Name, optional=KINDS), lambda one: len(one.model_fields_set) == 2)
PodSpec = checked(
    model(terminationGracePeriodSeconds=Count, containers=some(Container), volumes=list[Volume]),
    lambda one: (
        {mount.name for container in one.containers for mount in container.volumeMounts}
        == {volume.name for volume in one.volumes}
    ),
)
Pod = model(spec=PodSpec)
Start = dict[str, str]
HeadGroup = model(serviceType=one_of("ClusterIP NodePort LoadBalancer"), rayStartParams=Start, template=Pod)
WorkerGroup = checked(
    model(
        groupName=Name, rayStartParams=Start, template=Pod, **each(Count, "replicas minReplicas maxReplicas")
    ),
    lambda one: one.minReplicas <= one.replicas <= one.maxReplicas,
)
ClusterSpec = model(
    rayVersion=matching(r"^\d+\.\d+\.\d+$"),
    authOptions=model(mode=one_of("disabled token"), optional={"secretName": Name | None}),
    enableInTreeAutoscaling=bool,
    autoscalerOptions=model(
        version=one_of("v1 v2"),
        upscalingMode=one_of("Default Aggressive Conservative"),
        idleTimeoutSeconds=Count,
    ),
    headGroupSpec=HeadGroup,
    workerGroupSpecs=some(WorkerGroup),
)
JobSpec = model(
    entrypoint=Text,
    submissionMode=one_of("K8sJobMode HTTPMode InteractiveMode SidecarMode"),
    runtimeEnvYAML=str,
    shutdownAfterJobFinishes=bool,
    rayClusterSpec=ClusterSpec,
    **each(Count, "backoffLimit ttlSecondsAfterFinished"),
)


def resource(version: str, kind: str, longest: int, **fields: Any) -> type[BaseModel]:
    made: type[BaseModel] = model(
        apiVersion=Literal[version], kind=Literal[kind], metadata=meta(longest), **fields
    )
    return made


ConfigMap = resource("v1", "ConfigMap", 63, data=dict[str, str])
RESOURCES = {
    "RayJob": resource("ray.io/v1", "RayJob", 47, spec=JobSpec),
    "RayCluster": resource("ray.io/v1", "RayCluster", 63, spec=ClusterSpec),
}


def check(documents: list[Any]) -> tuple[Any, Any]:
    """The two documents of a manifest, or pydantic's `ValidationError`."""
    first, second = documents
    return ConfigMap.model_validate(first), RESOURCES[second["kind"]].model_validate(second)
