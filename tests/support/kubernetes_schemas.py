"""Whether manifests are what KubeRay's CRDs and Kubernetes take: unknown fields are errors.

The CRDs are KubeRay's own files, which are not part of this project: a folder with them is named by
RLFLOW_TEST_KUBERAY_CRDS, or lies in ../shared/kuberay beside the checkout.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

Tree = dict[str, Any]
ROOT = Path(__file__).parents[2]
KUBERNETES_VERSION = "1.34"


def crds() -> Path | None:
    """KubeRay's file of RayJobs; None where it is not there."""
    folder = Path(os.environ.get("RLFLOW_TEST_KUBERAY_CRDS") or ROOT.parent / "shared" / "kuberay")
    file = folder / "ray.io_rayjobs.yaml"
    return file if file.exists() else None


def check_rayjob(manifest: Tree) -> None:
    """Against the CRD, and its pods against Kubernetes."""
    file = crds()
    if file is None:
        pytest.skip("KubeRay's CRDs are not here; RLFLOW_TEST_KUBERAY_CRDS names a folder with them")
    check_crd(manifest, file)
    for template in pod_templates(manifest):
        check_kubernetes({"apiVersion": "v1", "kind": "Pod", **template} | {"metadata": {"name": "pod"}})


def check_crd(manifest: Tree, file: Path) -> None:
    _rayjob_validator(file).validate(manifest)


def check_kubernetes(manifest: Tree) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def pod_templates(rayjob: Tree) -> list[Tree]:
    spec = rayjob["spec"]
    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    submitter = [spec["submitterPodTemplate"]] if "submitterPodTemplate" in spec else []
    return [*(group["template"] for group in groups), *submitter]


@cache
def _rayjob_validator(file: Path) -> jsonschema.Draft202012Validator:
    crd = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    version = next(version for version in crd["spec"]["versions"] if version["name"] == "v1")
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def _strict(schema: Tree) -> Tree:
    """The same, but that fields which the API server would drop are errors."""
    changed = dict(schema)
    if "properties" in schema:
        changed["properties"] = {name: _strict(each) for name, each in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            changed["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            changed[key] = _strict(schema[key])
    return changed
