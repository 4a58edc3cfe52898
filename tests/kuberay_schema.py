"""What Kubernetes and KubeRay take, offline: refuses unknown keys, wrong types, and what is required and missing.

Kubernetes' own kinds, pod templates included: the OpenAPI schema that the package kubernetes-validate carries, in its strict form.
KubeRay's kinds: written by this project from KubeRay's API reference for ray.io/v1 (fields, types, required, allowed values),
without the fields that the manifests have no use for; pod templates in it are checked with Kubernetes' schema. It is no copy of the
CRD.
"""

import functools
import json
import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

Schema = dict[str, Any]  # Any: JSON schema, here and below
KUBERNETES = "v1.33.0-local-strict"
CORE = "io.k8s.api.core.v1."
KINDS = {
    ("v1", "Namespace"): CORE + "Namespace",
    ("v1", "PersistentVolumeClaim"): CORE + "PersistentVolumeClaim",
    ("networking.k8s.io/v1", "NetworkPolicy"): "io.k8s.api.networking.v1.NetworkPolicy",
}
QUANTITY = re.compile(r"^\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$")
LABEL = re.compile(r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")


def problems(manifest: dict[str, Any]) -> list[str]:
    """One line for each thing that is wrong; empty if it would be taken."""
    kind = str(manifest.get("apiVersion")), str(manifest.get("kind"))
    if kind in KINDS:
        schema = _core(KINDS[kind])
    elif kind in {("ray.io/v1", "RayCluster"), ("ray.io/v1", "RayJob")}:
        schema = RAY_CLUSTER if kind[1] == "RayCluster" else RAY_JOB
    else:
        return [f"{kind}: no such kind here"]
    validator = Draft202012Validator(schema, registry=_registry())
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)] + list(_values(manifest, "$"))


def _values(node: Any, where: str, key: str = "") -> Iterator[str]:
    """What the OpenAPI schema leaves open: quantities are such, no value is null, KubeRay's inner YAML is YAML."""
    if node is None:
        yield f"{where}: is empty"
    elif key in {"requests", "limits"}:
        yield from (f"{where}.{name}: {value!r} is no quantity" for name, value in node.items() if not QUANTITY.match(str(value)))
    elif key in {"sizeLimit", "storage"}:
        yield from [] if QUANTITY.match(str(node)) else [f"{where}: {node!r} is no quantity"]
    elif key in {"matchLabels", "labels", "nodeSelector"}:
        yield from (f"{where}: {name!r} is no label" for name in node if not LABEL.match(name))
    elif key == "runtimeEnvYAML":
        yield from [] if isinstance(yaml.safe_load(node), dict) else [f"{where}: is no map"]
    elif isinstance(node, dict):
        for name, value in node.items():
            yield from _values(value, f"{where}.{name}", name)
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _values(value, f"{where}[{number}]")


@functools.cache
def _registry() -> Registry:
    """With Kubernetes' definitions under the name that `_core` uses."""
    file = resources.files("kubernetes_validate") / "kubernetes-json-schema" / KUBERNETES / "_definitions.json"
    definitions = json.loads(file.read_text()) | {"$id": "urn:kubernetes"}
    return Registry().with_resource("urn:kubernetes", Resource.from_contents(definitions))


def _core(name: str) -> Schema:
    return {"$ref": f"urn:kubernetes#/$defs/{name}"}


def _map(required: str = "", **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


STRING, BOOLEAN, NUMBER = {"type": "string"}, {"type": "boolean"}, {"type": "number", "minimum": 0}
COUNT = {"type": "integer", "minimum": 0}
STRINGS = {"type": "object", "additionalProperties": STRING}
POD = _core(CORE + "PodTemplateSpec")
METADATA = _core("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")


def _kind(spec: Schema) -> Schema:
    return _map("apiVersion kind metadata spec", apiVersion=STRING, kind=STRING, metadata=METADATA, spec=spec)


def _pods(required: str = "", **properties: Schema) -> Schema:
    """What every group of pods has, the head and workers alike."""
    return _map(f"{required} rayStartParams template", rayStartParams=STRINGS, template=POD, **properties)


AUTOSCALER = _map(
    resources=_core(CORE + "ResourceRequirements"),
    image=STRING,
    imagePullPolicy=_one_of("Always", "IfNotPresent", "Never"),
    securityContext=_core(CORE + "SecurityContext"),
    idleTimeoutSeconds=COUNT,
    upscalingMode=_one_of("Default", "Aggressive", "Conservative"),
    version=_one_of("v1", "v2"),
    env=_list(_core(CORE + "EnvVar")),
    envFrom=_list(_core(CORE + "EnvFromSource")),
    volumeMounts=_list(_core(CORE + "VolumeMount")),
)
HEAD = _pods(
    serviceType=_one_of("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"),
    headService=_core(CORE + "Service"),
    enableIngress=BOOLEAN,
)
WORKERS = _pods(
    "groupName minReplicas maxReplicas",
    groupName=STRING,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts={"type": "integer", "minimum": 1},
    idleTimeoutSeconds=COUNT,
    suspend=BOOLEAN,
)
CLUSTER_SPEC = _map(
    "headGroupSpec",
    rayVersion=STRING,
    enableInTreeAutoscaling=BOOLEAN,
    autoscalerOptions=AUTOSCALER,
    authOptions=_map(mode=_one_of("disabled", "token")),
    headServiceAnnotations=STRINGS,
    suspend=BOOLEAN,
    headGroupSpec=HEAD,
    workerGroupSpecs=_list(WORKERS),
)
JOB_SPEC = _map(
    entrypoint=STRING,
    runtimeEnvYAML=STRING,
    clusterSelector=STRINGS,
    rayClusterSpec=CLUSTER_SPEC,
    submissionMode=_one_of("K8sJobMode", "HTTPMode", "InteractiveMode"),
    submitterPodTemplate=POD,
    submitterConfig=_map(backoffLimit=COUNT),
    metadata=STRINGS,
    jobId=STRING,
    entrypointNumCpus=NUMBER,
    entrypointNumGpus=NUMBER,
    entrypointResources=STRING,
    backoffLimit=COUNT,
    activeDeadlineSeconds={"type": "integer", "minimum": 1},
    ttlSecondsAfterFinished=COUNT,
    shutdownAfterJobFinishes=BOOLEAN,
    suspend=BOOLEAN,
)
JOB_SPEC["oneOf"] = [{"required": ["clusterSelector"]}, {"required": ["rayClusterSpec"]}]  # a cluster that is there, or its own
RAY_CLUSTER, RAY_JOB = _kind(CLUSTER_SPEC), _kind(JOB_SPEC)
