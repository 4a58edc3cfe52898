"""The manifests agree with each other and with the configuration. No cluster is asked."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import termrsi
from termrsi.config import load

ROOT = Path(__file__).resolve().parents[2]
Manifest = dict[str, Any]  # Any: YAML


def manifests() -> list[Manifest]:
    files = sorted((ROOT / "k8s").glob("*.yaml"))
    return [m for f in files for m in yaml.safe_load_all(f.read_text()) if m is not None]


def of_kind(kind: str) -> list[Manifest]:
    return [m for m in manifests() if m["kind"] == kind]


def ray_groups() -> dict[str, Manifest]:
    (cluster,) = of_kind("RayCluster")
    spec = cluster["spec"]
    return {"head": spec["headGroupSpec"]} | {g["groupName"]: g for g in spec["workerGroupSpecs"]}


def pod_templates() -> dict[str, Manifest]:
    (job,) = of_kind("RayJob")
    return {name: g["template"] for name, g in ray_groups().items()} | {"submitter": job["spec"]["submitterPodTemplate"]}


def labels_of(template: Manifest) -> dict[str, str]:
    return template["metadata"]["labels"]


def matching(selector: dict[str, str]) -> list[str]:
    return [name for name, t in pod_templates().items() if selector.items() <= labels_of(t).items()]


def test_every_manifest_is_whole_and_named_once() -> None:
    assert {m["kind"] for m in manifests()} == {"Namespace", "PersistentVolumeClaim", "RayCluster", "RayJob", "NetworkPolicy"}
    keys = [(m["kind"], m["metadata"]["name"]) for m in manifests()]
    assert len(keys) == len(set(keys))
    versions = {m["kind"]: m["apiVersion"] for m in manifests()}
    assert versions["RayCluster"] == versions["RayJob"] == "ray.io/v1"
    assert versions["NetworkPolicy"] == "networking.k8s.io/v1"


def test_one_namespace() -> None:
    (namespace,) = of_kind("Namespace")
    assert {m["metadata"]["namespace"] for m in manifests() if m["kind"] != "Namespace"} == {namespace["metadata"]["name"]}


def test_one_image_of_this_version_everywhere() -> None:
    images = {c["image"] for t in pod_templates().values() for c in t["spec"]["containers"]}
    assert len(images) == 1
    assert images.pop().endswith(f"/termrsi:{termrsi.__version__}")


def test_ray_is_the_pinned_one() -> None:
    (cluster,) = of_kind("RayCluster")
    assert f"ray=={cluster['spec']['rayVersion']}" in (ROOT / "constraints-cpu.txt").read_text().splitlines()


def test_volumes_and_claims_exist_and_are_used() -> None:
    claims = {c["metadata"]["name"] for c in of_kind("PersistentVolumeClaim")}
    used = set()
    for name, template in pod_templates().items():
        volumes = {v["name"]: v for v in template["spec"].get("volumes", [])}
        mounted = {m["name"] for c in template["spec"]["containers"] for m in c.get("volumeMounts", [])}
        assert mounted == set(volumes), name
        used |= {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
    assert used == claims


def test_container_names_are_the_operators() -> None:
    assert [t["spec"]["containers"][0]["name"] for t in pod_templates().values()] == [
        "ray-head",
        "ray-worker",
        "ray-worker",
        "submitter",
    ]


def test_ray_start_parameters_are_strings() -> None:
    values = itertools.chain.from_iterable(g["rayStartParams"].values() for g in ray_groups().values())
    assert all(isinstance(v, str) for v in values)


def selectors(policy: Manifest) -> Iterator[dict[str, str]]:
    """Selectors of pods in the policy's own namespace."""
    yield policy["spec"]["podSelector"]["matchLabels"]
    for rule in (*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])):
        for peer in (*rule.get("from", []), *rule.get("to", [])):
            if "podSelector" in peer and "namespaceSelector" not in peer:
                yield peer["podSelector"]["matchLabels"]


def test_policies_select_pods_that_exist() -> None:
    for policy in of_kind("NetworkPolicy"):
        for selector in selectors(policy):
            assert matching(selector), f"{policy['metadata']['name']}: nothing has {selector}"


def test_the_sandbox_policy_covers_the_sandbox_pods_and_closes_egress() -> None:
    policy = next(p for p in of_kind("NetworkPolicy") if p["metadata"]["name"] == "sandbox")
    assert matching(policy["spec"]["podSelector"]["matchLabels"]) == ["sandbox"]
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    to_cluster, to_names = policy["spec"]["egress"]
    assert set(matching(to_cluster["to"][0]["podSelector"]["matchLabels"])) >= {"head", "gpu", "sandbox"}
    assert {p["port"] for p in to_names["ports"]} == {53}
    peers = [peer for rule in policy["spec"]["egress"] for peer in rule["to"]]
    assert all("podSelector" in p and "ipBlock" not in p for p in peers), "no addresses, no whole namespaces"


def test_only_sandbox_pods_have_privileges_and_they_stand_apart() -> None:
    for name, template in pod_templates().items():
        spec = template["spec"]
        contexts = [c.get("securityContext") for c in spec["containers"]]
        assert (contexts != [None]) == (name == "sandbox")
    spec = pod_templates()["sandbox"]["spec"]
    security = spec["containers"][0]["securityContext"]
    assert security["capabilities"] == {"add": ["SYS_ADMIN"]}
    assert "privileged" not in security
    assert spec["automountServiceAccountToken"] is False
    (toleration,) = spec["tolerations"]
    assert spec["nodeSelector"] == {toleration["key"]: toleration["value"]}, "the label and the taint are set with one name"
    readme = (ROOT / "k8s" / "README.md").read_text()
    assert f"{toleration['key']}={toleration['value']}:{toleration['effect']}" in readme
    mounts = {m["name"] for m in spec["containers"][0]["volumeMounts"]}
    assert "runs" not in mounts, "agents have no way to the runs"


def test_the_layers_volume_is_where_sandboxes_look() -> None:
    container = pod_templates()["sandbox"]["spec"]["containers"][0]
    (state,) = [e["value"] for e in container["env"] if e["name"] == "XDG_RUNTIME_DIR"]
    assert state in {m["mountPath"] for m in container["volumeMounts"]}


def test_the_job_runs_on_the_cluster_and_its_configuration_exists(tmp_path: Path) -> None:
    (job,), (cluster,) = of_kind("RayJob"), of_kind("RayCluster")
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    words = job["spec"]["entrypoint"].split()
    assert words[:3] == ["python", "-m", "termrsi"]
    mounts = {m["mountPath"] for m in ray_groups()["head"]["template"]["spec"]["containers"][0]["volumeMounts"]}
    for word in words[3:]:
        value = word.partition("=")[2]
        if value.startswith("/"):
            assert any(value.startswith(f"{m}/") for m in mounts), f"{word} is on no volume of the head"
    (tmp_path / "config.json").write_text("{}")  # the paths of the pod, stood in for
    moved = [re.sub(r"=/data/.*", f"={tmp_path}", w) for w in words[3:]]
    config = load.load(moved)
    assert (config.experiment, config.scale, config.cluster.address) == ("terminal_rsi", "full", "auto")


def test_gpu_nodes_hold_what_the_cluster_file_counts_on() -> None:
    (workers,) = [g for g in ray_groups().values() if g.get("groupName") == "gpu"]
    gpus = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert workers["replicas"] * gpus == 16  # cluster=a100x16


@pytest.mark.parametrize("name", ["storage.yaml", "networkpolicy.yaml", "raycluster.yaml", "rayjob.yaml"])
def test_the_readme_says_how_to_apply_each(name: str) -> None:
    assert f"kubectl apply -f k8s/{name}" in (ROOT / "k8s" / "README.md").read_text()
