"""Renders what of kustomize the manifests use, so that they are tested where kustomize is not installed.

Made by this project from kustomize's documentation: `resources`, `components`, `namespace`, `images` with a new tag, and `patches`,
as JSON 6902 operations or as a merge of maps. A merge that meets a list of maps is refused: kustomize merges such lists by a key
that it knows for its own kinds alone. Anything else in a kustomization is refused too.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]  # Any: YAML, here and below
KEYS = {"apiVersion", "kind", "namespace", "resources", "components", "patches", "images"}


def render(folder: Path) -> list[Manifest]:
    """The manifests of an overlay, in the order of its resources. Raises ValueError for what is not understood."""
    return _build(folder.resolve(), [])


def _build(folder: Path, found: list[Manifest]) -> list[Manifest]:
    """`found`: what the kustomization that names this component has so far."""
    asked = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := asked.keys() - KEYS:
        raise ValueError(f"{folder}: not rendered here: {', '.join(sorted(unknown))}")
    for name in asked.get("resources", []):
        path = folder / name
        found += _build(path.resolve(), []) if path.is_dir() else [_own(m) for m in yaml.safe_load_all(path.read_text()) if m]
    for name in asked.get("components", []):
        found = _build((folder / name).resolve(), found)
    for patch in asked.get("patches", []):
        _patch(found, patch, folder)
    for image in asked.get("images", []):
        for container in _containers(found):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['name']}:{image['newTag']}"
    if namespace := asked.get("namespace"):
        for manifest in found:
            if manifest["kind"] != "Namespace":
                manifest["metadata"]["namespace"] = namespace
    return found


def _own(manifest: Manifest) -> Manifest:
    """Without what YAML's anchors share: an operation on one place changes no other."""
    if isinstance(manifest, dict):
        return {key: _own(value) for key, value in manifest.items()}
    return [_own(value) for value in manifest] if isinstance(manifest, list) else manifest


def _patch(found: list[Manifest], patch: Manifest, folder: Path) -> None:
    what = yaml.safe_load(patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text())
    target = patch.get("target") or {"kind": what["kind"], "name": what["metadata"]["name"]}
    chosen = [m for m in found if (m["kind"], m["metadata"]["name"]) == (target["kind"], target["name"])]
    if len(chosen) != 1:
        raise ValueError(f"{folder}: {target} is {len(chosen)} manifests")
    if isinstance(what, list):
        for operation in what:
            _operate(chosen[0], **operation)
    else:
        _merge(chosen[0], what)


def _operate(manifest: Manifest, op: str, path: str, value: Any = None) -> None:
    """One operation of RFC 6902 on a map's key or a list's index; `-` is behind the last."""
    *way, last = path.removeprefix("/").split("/")
    place: Any = manifest
    for step in way:
        place = place[int(step) if isinstance(place, list) else step]
    key: Any = last if isinstance(place, dict) else len(place) if last == "-" else int(last)
    value = copy.deepcopy(value)
    there = key in place if isinstance(place, dict) else key < len(place)
    if op == "test" and there and place[key] == value:
        return
    if op == "add" and isinstance(place, list):
        place.insert(key, value)
    elif op == "add" or (op == "replace" and there):
        place[key] = value
    else:
        raise ValueError(f"{op} {path}: {place[key] if there else 'is not there'}")


def _merge(into: Manifest, what: Manifest) -> None:
    for key, value in what.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            raise ValueError(f"{key}: a list of maps is not merged here; give operations")
        else:
            into[key] = value


def _containers(node: Any) -> Iterator[Manifest]:
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _containers(value)
    if isinstance(node, dict):
        for key in ("containers", "initContainers"):
            yield from node.get(key, [])


def changed(folder: Path, into: Path, change: Callable[[str], str]) -> Path:
    """A copy of all kustomizations with one overlay's files changed; where that overlay lies now."""
    root = folder.parents[1]
    for path in root.rglob("*.yaml"):
        copied = into / path.relative_to(root)
        copied.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text()
        copied.write_text(change(text) if path.parent == folder else text)
    return into / folder.relative_to(root)
