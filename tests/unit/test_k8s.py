"""The manifests, as each overlay renders them: taken by the schemas, and true of each other. No cluster is asked."""

import copy
import functools
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import termrsi
from termrsi.config import load
from tests import kuberay_schema, kustomize

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ROOT / "k8s" / "overlays"
SIZES = ("small", "a100")
SANDBOXES = ("docker", "local")
UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
Manifest = dict[str, Any]  # Any: YAML


def overlay(size: str, sandbox: str, scratch: Path) -> Path:
    """An overlay as the README says to change it for the other kind of sandboxes."""

    def change(text: str) -> str:
        text = re.sub(r"^(  - \S*)sandbox-docker", rf"\1sandbox-{sandbox}", text, flags=re.MULTILINE)
        return text.replace("sandbox.backend=docker", f"sandbox.backend={sandbox}")

    return kustomize.changed(OVERLAYS / size, scratch, change)


@functools.cache
def render(size: str, sandbox: str) -> "Rendered":
    """Read only: one for all tests."""
    with tempfile.TemporaryDirectory() as scratch:
        return Rendered(size, sandbox, kustomize.render(overlay(size, sandbox, Path(scratch))))


@pytest.fixture(params=[(size, sandbox) for size in SIZES for sandbox in SANDBOXES], ids="-".join)
def rendered(request: pytest.FixtureRequest) -> "Rendered":
    return render(*request.param)


class Rendered:
    """One overlay's manifests, and what of them is asked for often."""

    def __init__(self, size: str, sandbox: str, manifests: list[Manifest]) -> None:
        self.size, self.sandbox, self.manifests = size, sandbox, manifests

    def of_kind(self, kind: str) -> list[Manifest]:
        return [m for m in self.manifests if m["kind"] == kind]

    @property
    def groups(self) -> dict[str, Manifest]:
        (cluster,) = self.of_kind("RayCluster")
        return {"head": cluster["spec"]["headGroupSpec"]} | {g["groupName"]: g for g in cluster["spec"]["workerGroupSpecs"]}

    @property
    def job(self) -> Manifest:
        (job,) = self.of_kind("RayJob")
        return job["spec"]

    @property
    def pods(self) -> dict[str, Manifest]:
        """Pod templates by role."""
        return {name: g["template"] for name, g in self.groups.items()} | {"submitter": self.job["submitterPodTemplate"]}

    @property
    def containers(self) -> dict[str, Manifest]:
        """The container that runs Ray, or the submitter, by role."""
        return {name: pod["spec"]["containers"][0] for name, pod in self.pods.items()}

    def matching(self, selector: dict[str, str]) -> list[str]:
        return [name for name, pod in self.pods.items() if selector.items() <= pod["metadata"]["labels"].items()]


def amount(quantity: str) -> float:
    """Cores or bytes."""
    match = re.fullmatch(r"([\d.]+)(\w*)", quantity)
    assert match is not None
    return float(match[1]) * UNITS[match[2]]


def everywhere(node: Any) -> Iterator[Manifest]:  # Any: YAML
    if isinstance(node, dict):
        yield node
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from everywhere(value)


# What Kubernetes and KubeRay take


def test_the_schemas_take_every_manifest(rendered: Rendered) -> None:
    assert {m["kind"]: kuberay_schema.problems(m) for m in rendered.manifests} == {
        kind: [] for kind in ("Namespace", "PersistentVolumeClaim", "NetworkPolicy", "RayCluster", "RayJob")
    }


def wrong(kind: str, change: Callable[[Manifest], object]) -> list[str]:
    found = render("small", "docker").of_kind(kind)[0]
    spoilt = copy.deepcopy(found)
    change(spoilt)
    return kuberay_schema.problems(spoilt)


def head(m: Manifest) -> Manifest:
    return m["spec"]["headGroupSpec"]


def container(m: Manifest) -> Manifest:
    return m["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("RayCluster", lambda m: m["spec"].update(workerGroupSpec=[]), "'workerGroupSpec' was unexpected"),
        ("RayCluster", lambda m: m["spec"].pop("headGroupSpec"), "'headGroupSpec' is a required property"),
        ("RayCluster", lambda m: m["spec"].update(enableInTreeAutoscaling="true"), "'true' is not of type 'boolean'"),
        ("RayCluster", lambda m: m["spec"]["autoscalerOptions"].update(upscalingMode="Slow"), "'Slow' is not one of"),
        ("RayCluster", lambda m: head(m)["rayStartParams"].update({"num-cpus": 2}), "2 is not of type 'string'"),
        ("RayCluster", lambda m: m["spec"]["workerGroupSpecs"][0].pop("minReplicas"), "'minReplicas' is a required property"),
        ("RayCluster", lambda m: m["spec"]["workerGroupSpecs"][1].update(maxReplicas=-1), "-1 is less than the minimum"),
        ("RayCluster", lambda m: container(m).pop("name"), "'name' is a required property"),
        ("RayCluster", lambda m: container(m).update(imagePullPolice="Always"), "'imagePullPolice' was unexpected"),
        ("RayCluster", lambda m: container(m)["resources"]["limits"].update(memory="6 GB"), "'6 GB' is no quantity"),
        ("RayCluster", lambda m: container(m)["env"][0].update(value=1), "1 is not of type"),
        ("RayCluster", lambda m: container(m).update(livenessProbe=None), "livenessProbe: is empty"),
        ("RayCluster", lambda m: container(m)["livenessProbe"]["httpGet"].pop("port"), "'port' is a required property"),
        ("RayJob", lambda m: m["spec"].update(entryPoint="python"), "'entryPoint' was unexpected"),
        ("RayJob", lambda m: m["spec"].update(submissionMode="Job"), "'Job' is not one of"),
        ("RayJob", lambda m: m["spec"].update(rayClusterSpec={"headGroupSpec": {}}), "valid under each of"),
        ("RayJob", lambda m: m["spec"].pop("clusterSelector"), "is not valid under any of"),
        ("RayJob", lambda m: m["spec"].update(runtimeEnvYAML="- a"), "is no map"),
        ("RayJob", lambda m: m["spec"]["submitterPodTemplate"]["spec"].update(restartPolicy=1), "1 is not of type"),
        ("NetworkPolicy", lambda m: m["spec"].update(egres=[]), "'egres' was unexpected"),
        ("NetworkPolicy", lambda m: m["spec"].update(policyTypes="Egress"), "'Egress' is not of type"),
        ("PersistentVolumeClaim", lambda m: m["spec"]["resources"]["requests"].update(storage="20 Gi"), "is no quantity"),
        ("PersistentVolumeClaim", lambda m: m.update(apiVersion="v2"), "no such kind"),
    ],
)
def test_the_schemas_refuse(kind: str, change: Callable[[Manifest], object], told: str) -> None:
    assert told in "\n".join(wrong(kind, change))


# What renders them


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("sandbox", SANDBOXES)
@pytest.mark.parametrize("size", SIZES)
def test_kustomize_renders_the_same(size: str, sandbox: str, tmp_path: Path) -> None:
    version = json.loads(subprocess.run(["kubectl", "version", "--client", "-o", "json"], capture_output=True, check=True).stdout)
    if not version.get("kustomizeVersion", "").startswith("v5"):
        pytest.skip("kubectl has no kustomize of version 5")
    folder = overlay(size, sandbox, tmp_path)
    out = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, check=True, text=True).stdout

    def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
        return {(m["kind"], m["metadata"]["name"]): m for m in manifests}

    assert by_name(kustomize.render(folder)) == by_name(list(yaml.safe_load_all(out)))


@pytest.mark.parametrize(
    ("operations", "told"),
    [
        ("- {op: test, path: /spec/rayVersion, value: 2.0.0}", "test /spec/rayVersion: 2.60.0"),
        ("- {op: replace, path: /spec/none, value: 1}", "replace /spec/none: is not there"),
        ("- {op: remove, path: /spec/rayVersion}", "remove /spec/rayVersion: 2.60.0"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused(operations: str, told: str, tmp_path: Path) -> None:
    folder = overlay("small", "docker", tmp_path)
    file = folder / "kustomization.yaml"
    asked = yaml.safe_load(file.read_text())
    asked["patches"].append({"target": {"kind": "RayCluster", "name": "termrsi"}, "patch": operations})
    file.write_text(yaml.safe_dump(asked))
    with pytest.raises(ValueError, match=re.escape(told)):
        kustomize.render(folder)


def test_a_kustomization_beyond_the_subset_is_refused(tmp_path: Path) -> None:
    folder = overlay("small", "docker", tmp_path)
    (folder / "kustomization.yaml").write_text("resources: []\nreplacements: []\n")
    with pytest.raises(ValueError, match="not rendered here: replacements"):
        kustomize.render(folder)


# What they say of each other


def test_names_and_namespace(rendered: Rendered) -> None:
    keys = [(m["kind"], m["metadata"]["name"]) for m in rendered.manifests]
    assert len(keys) == len(set(keys))
    (namespace,) = rendered.of_kind("Namespace")
    assert {m["metadata"]["namespace"] for m in rendered.manifests if m["kind"] != "Namespace"} == {namespace["metadata"]["name"]}


def test_one_image_of_this_version_everywhere(rendered: Rendered) -> None:
    images = {c["image"] for c in rendered.containers.values()}
    kind = {"small": "cpu", "a100": "gpu"}[rendered.size]
    assert images == {f"registry.example.com/termrsi:{termrsi.__version__}-{kind}"}
    assert f"termrsi:{termrsi.__version__}-{kind}" in (ROOT / "k8s" / "Dockerfile").read_text()


def test_ray_is_the_pinned_one(rendered: Rendered) -> None:
    (cluster,) = rendered.of_kind("RayCluster")
    assert f"ray=={cluster['spec']['rayVersion']}" in (ROOT / "constraints-cpu.txt").read_text().splitlines()


def test_volumes_and_claims_exist_and_are_used(rendered: Rendered) -> None:
    claims = {c["metadata"]["name"] for c in rendered.of_kind("PersistentVolumeClaim")}
    used = set()
    for name, pod in rendered.pods.items():
        spec = pod["spec"]
        volumes = {v["name"]: v for v in spec.get("volumes", [])}
        mounted = {m["name"] for c in [*spec["containers"], *spec.get("initContainers", [])] for m in c.get("volumeMounts", [])}
        assert mounted == set(volumes), name
        used |= {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
    assert used == claims


def test_groups_scale_and_offer_a_resource_of_their_name(rendered: Rendered) -> None:
    (cluster,) = rendered.of_kind("RayCluster")
    assert cluster["spec"]["enableInTreeAutoscaling"] is True
    workers = {name: g for name, g in rendered.groups.items() if name != "head"}
    assert list(workers) == ["generator", "learner", "sandbox"]
    for name, group in workers.items():
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert json.loads(json.loads(group["rayStartParams"]["resources"])).keys() == {name}  # quoted for the shell
        assert rendered.pods[name]["metadata"]["labels"]["termrsi/role"] == name
    assert workers["sandbox"]["minReplicas"] < workers["sandbox"]["maxReplicas"]
    assert all(pod["spec"]["restartPolicy"] == "Never" for pod in rendered.pods.values()), "the autoscaler replaces pods"


def test_every_container_has_requests_and_limits(rendered: Rendered) -> None:
    for pod in rendered.pods.values():
        for c in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            requests, limits = c["resources"]["requests"], c["resources"]["limits"]
            assert requests.keys() == limits.keys() >= {"cpu", "memory"}
            assert all(amount(requests[what]) <= amount(limits[what]) for what in limits)


def test_the_object_store_fits_into_shared_memory_and_that_into_the_limit(rendered: Rendered) -> None:
    for name, group in rendered.groups.items():
        (shm,) = [v["emptyDir"] for v in group["template"]["spec"]["volumes"] if v["name"] == "shm"]
        assert shm["medium"] == "Memory"
        assert "/dev/shm" in {m["mountPath"] for m in rendered.containers[name]["volumeMounts"] if m["name"] == "shm"}
        limit = amount(rendered.containers[name]["resources"]["limits"]["memory"])
        assert int(group["rayStartParams"]["object-store-memory"]) <= amount(shm["sizeLimit"]) <= limit / 2


def test_probes_ask_rays_own_addresses(rendered: Rendered) -> None:
    ports = {"gcs": 8265, "raylet": 52365}
    for name in rendered.groups:
        c = rendered.containers[name]
        ready, live = c["readinessProbe"]["httpGet"], c["livenessProbe"]["httpGet"]
        assert ready == ({"path": "/api/gcs_healthz", "port": ports["gcs"]} if name == "head" else live)
        assert live == {"path": "/api/local_raylet_healthz", "port": ports["raylet"]}
        assert {"name": "metrics", "containerPort": 8080} in c["ports"]
        assert rendered.groups[name]["rayStartParams"]["metrics-export-port"] == "8080"


def test_secrets_are_referred_to_and_optional_and_not_with_agents(rendered: Rendered) -> None:
    keys = {"HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY"}
    for name in ("head", "generator", "learner"):
        given = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in rendered.containers[name]["env"] if "valueFrom" in e}
        assert given == {key: {"name": "termrsi-keys", "key": key, "optional": True} for key in keys}
    of_sandboxes = list(everywhere(rendered.pods["sandbox"]))
    assert not [node for node in of_sandboxes if "secretKeyRef" in node or "secretRef" in node or "secret" in node]
    assert not [m for m in rendered.manifests if m["kind"] == "Secret"]


# Sandboxes


def test_policies_select_pods_that_exist(rendered: Rendered) -> None:
    for policy in rendered.of_kind("NetworkPolicy"):
        spec = policy["spec"]
        rules = (*spec.get("ingress", []), *spec.get("egress", []))
        peers = [p for rule in rules for p in (*rule.get("from", []), *rule.get("to", []))]
        own = [p["podSelector"]["matchLabels"] for p in peers if "namespaceSelector" not in p]
        for selector in (spec["podSelector"]["matchLabels"], *own):
            assert rendered.matching(selector), f"{policy['metadata']['name']}: nothing has {selector}"


def test_the_sandbox_policy_covers_the_sandbox_pods_and_closes_egress(rendered: Rendered) -> None:
    policy = next(p for p in rendered.of_kind("NetworkPolicy") if p["metadata"]["name"] == "sandbox")
    assert rendered.matching(policy["spec"]["podSelector"]["matchLabels"]) == ["sandbox"]
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    to_cluster, to_names = policy["spec"]["egress"]
    assert set(rendered.matching(to_cluster["to"][0]["podSelector"]["matchLabels"])) >= {"head", "generator", "learner", "sandbox"}
    assert {p["port"] for p in to_names["ports"]} == {53}
    peers = [peer for rule in policy["spec"]["egress"] for peer in rule["to"]]
    assert all("podSelector" in p and "ipBlock" not in p for p in peers), "no addresses, no whole namespaces"


def test_only_sandbox_pods_have_privileges(rendered: Rendered) -> None:
    with_context = {name for name, pod in rendered.pods.items() if any("securityContext" in node for node in everywhere(pod))}
    assert with_context == {"sandbox"}
    spec = rendered.pods["sandbox"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    own = spec["containers"][0].get("securityContext")
    if rendered.sandbox == "docker":
        (daemon,) = spec["initContainers"]
        assert own is None, "Ray's container needs no privilege: the daemon has it"
        assert daemon["securityContext"] == {"privileged": True}
        assert daemon["restartPolicy"] == "Always", "a side car: it goes on, and Ray starts after it"
    else:
        assert "initContainers" not in spec
        assert own["capabilities"] == {"add": ["SYS_ADMIN"]}
        assert "privileged" not in own


def test_agents_have_no_way_to_the_runs(rendered: Rendered) -> None:
    spec = rendered.pods["sandbox"]["spec"]
    claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
    assert set(claims.values()) == {"termrsi-cache"}
    mounts = [m for c in [*spec["containers"], *spec.get("initContainers", [])] for m in c["volumeMounts"] if m["name"] in claims]
    assert [(m["subPath"], m["readOnly"]) for m in mounts] == [("tasks", True)]


def test_ray_and_the_daemon_share_a_socket_and_a_limit() -> None:
    for size in SIZES:
        spec = render(size, "docker").pods["sandbox"]["spec"]
        (ray,), (daemon,) = spec["containers"], spec["initContainers"]
        address = next(e["value"] for e in ray["env"] if e["name"] == "DOCKER_HOST")
        assert f"--host={address}" in daemon["args"]
        assert f"--host={address}" in daemon["startupProbe"]["exec"]["command"]
        place = str(Path(address.removeprefix("unix://")).parent)
        shared = [next(m["name"] for m in c["volumeMounts"] if m["mountPath"] == place) for c in (ray, daemon)]
        (volume,) = [v for v in spec["volumes"] if v["name"] == shared[0]]
        assert shared[0] == shared[1]
        assert volume["emptyDir"] == {}
        assert ray["resources"]["limits"]["memory"] == daemon["resources"]["limits"]["memory"], "what the one counts, the other has"


def test_layers_lie_where_the_driver_says(rendered: Rendered) -> None:
    places = {next(e["value"] for e in rendered.containers[n]["env"] if e["name"] == "XDG_RUNTIME_DIR") for n in rendered.groups}
    assert len(places) == 1, "the driver names its own to the sandbox nodes"
    (place,) = places
    assert all(place in {m["mountPath"] for m in rendered.containers[name]["volumeMounts"]} for name in rendered.groups)


# The run


def test_the_job_runs_on_the_cluster_and_its_configuration_exists(rendered: Rendered, tmp_path: Path) -> None:
    (cluster,) = rendered.of_kind("RayCluster")
    assert rendered.job["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    words = rendered.job["entrypoint"].split()
    assert words[:3] == ["python", "-m", "termrsi"]
    mounts = {m["mountPath"] for m in rendered.containers["head"]["volumeMounts"]}
    for word in words[3:]:
        value = word.partition("=")[2]
        if value.startswith("/"):
            assert any(value.startswith(f"{m}/") for m in mounts), f"{word} is on no volume of the head"
    (tmp_path / "config.json").write_text("{}")  # the paths of the pod, stood in for
    config = load.load([re.sub(r"=/cache/.*", f"={tmp_path}", word) for word in words[3:]])
    scale = {"small": "laptop", "a100": "full"}[rendered.size]
    assert (config.experiment, config.scale, config.cluster.address) == ("terminal_rsi", scale, "auto")
    assert config.sandbox.backend == rendered.sandbox, "the component and the entrypoint say the same"


def test_sixteen_gpus_on_two_nodes() -> None:
    found = render("a100", "docker")
    gpus = {
        name: (group["minReplicas"], group["maxReplicas"], int(found.containers[name]["resources"]["limits"]["nvidia.com/gpu"]))
        for name, group in found.groups.items()
        if "nvidia.com/gpu" in found.containers[name]["resources"]["limits"]
    }
    assert gpus == {"generator": (1, 1, 8), "learner": (1, 1, 8)}
    assert "cluster=a100x16" in found.job["entrypoint"]
    for name in gpus:
        (toleration,) = found.pods[name]["spec"]["tolerations"]
        assert toleration["key"] == "nvidia.com/gpu"


def test_sandboxes_of_the_large_size_stand_apart() -> None:
    spec = render("a100", "docker").pods["sandbox"]["spec"]
    (toleration,) = spec["tolerations"]
    assert spec["nodeSelector"] == {toleration["key"]: toleration["value"]}, "the label and the taint are set with one name"
    assert f"{toleration['key']}={toleration['value']}:{toleration['effect']}" in (ROOT / "k8s" / "README.md").read_text()


def test_the_small_size_is_what_it_says() -> None:
    found = render("small", "docker")
    (cluster,) = found.of_kind("RayCluster")
    requests = [cluster["spec"]["autoscalerOptions"]["resources"]["requests"]]
    for name, pod in found.pods.items():
        count = found.groups[name].get("replicas", 1) if name in found.groups else 1
        containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
        requests += count * [c["resources"]["requests"] for c in containers]
    cores, memory = (sum(amount(r[what]) for r in requests) for what in ("cpu", "memory"))
    assert (cores, memory / 2**30) == (10.0, 29.5)
    assert "Ten cores and 29.5 GiB" in (OVERLAYS / "small" / "kustomization.yaml").read_text()


@pytest.mark.parametrize("size", SIZES)
def test_the_readme_says_how_to_apply_each(size: str) -> None:
    assert f"kubectl apply -k k8s/overlays/{size}" in (ROOT / "k8s" / "README.md").read_text()
