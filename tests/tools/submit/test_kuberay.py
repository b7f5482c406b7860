"""RayJobs that `rlflow submit` writes: their shape, what they grant, and the files in k8s/."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_schemas import ROOT, Tree, check_kubernetes, check_rayjob, pod_templates
from rayjobs import checked, job, rendered

from rlflow.config import Config, PoolConfig, Scheduler
from rlflow.errors import ConfigError
from rlflow.rundir.directory import claim
from rlflow.tools.submit.command_words import RUNS, Job
from rlflow.tools.submit.kuberay import render, to_yaml

OVERLAYS = sorted(path.name for path in (ROOT / "k8s" / "overlays").iterdir())
SCHEDULERS = ["kueue", "volcano", "kai"]
ADVANCED = [
    "recipe=grpo_7b",
    "cluster=kuberay_split",
    "rollout.engines=2",
    "trainer.ranks=6",
    "weights.transport=p2p",
    "cluster.kubernetes.namespace=research",
    "cluster.kubernetes.secrets=[hugging-face,wandb]",
    "cluster.kubernetes.retries=0",
    "+cluster.pools.training.node_labels={gpu: h100}",
    "cluster.pools.training.memory_gb=384.5",
]


def overlay_words(overlay: str) -> list[str]:
    """What `rayjob.yaml` says that it was made with."""
    lines = (ROOT / "k8s" / "overlays" / overlay / "rayjob.yaml").read_text().splitlines()
    command = next(line for line in lines if line.startswith("# rlflow submit "))
    words = shlex.split(command)[3:]
    assert words[-1] == "--dry-run"
    return words[:-1]


def kustomize(folder: Path) -> dict[str, Tree]:
    """Kind -> manifest."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    built = subprocess.run(["kubectl", "kustomize", str(folder)], check=True, capture_output=True, text=True)
    return {each["kind"]: each for each in yaml.safe_load_all(built.stdout)}


def containers(rayjob: Tree) -> Iterator[Tree]:
    for template in pod_templates(rayjob):
        yield from template["spec"]["containers"]
        yield from template["spec"].get("initContainers", ())


def all_rayjobs() -> list[Any]:
    queues = [("cluster.kubernetes.scheduler=" + name, "cluster.kubernetes.queue=q") for name in SCHEDULERS]
    words = [overlay_words(name) for name in OVERLAYS]
    words += [ADVANCED, *(["recipe=smoke", "cluster=kuberay", *queue] for queue in queues)]
    return [pytest.param(each, id=" ".join(each[:2] + each[-1:])) for each in words]


@pytest.mark.parametrize("words", all_rayjobs())
def test_a_rayjob_is_what_the_api_server_takes(words: list[str]) -> None:
    check_rayjob(rendered(*words))


def test_the_api_server_would_refuse_a_field_that_does_not_exist() -> None:
    rayjob = rendered("recipe=smoke", "cluster=kuberay")
    rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["hostNetworks"] = True
    with pytest.raises(jsonschema.ValidationError, match="hostNetworks"):
        check_rayjob(rayjob)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_what_the_command_at_its_top_prints(overlay: str) -> None:
    file = ROOT / "k8s" / "overlays" / overlay / "rayjob.yaml"
    assert yaml.safe_load(file.read_text()) == rendered(*overlay_words(overlay), name=overlay)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_other_parts_of_an_overlay_are_what_the_api_server_takes(overlay: str) -> None:
    built = kustomize(ROOT / "k8s" / "overlays" / overlay)
    assert built["RayJob"]["metadata"]["name"] == overlay
    assert built["PersistentVolumeClaim"]["metadata"]["name"] == "rlflow"
    for kind in ("PersistentVolumeClaim", "NetworkPolicy"):
        check_kubernetes(built[kind])


def test_the_pod_for_copying_has_the_rights_of_the_others() -> None:
    files = yaml.safe_load((ROOT / "k8s" / "files.yaml").read_text())
    check_kubernetes(files)
    _, worker, _ = (template["spec"] for template in pod_templates(rendered("recipe=smoke", "cluster=kuberay")))
    [container], [expected] = files["spec"]["containers"], worker["containers"]
    assert files["spec"]["securityContext"] == worker["securityContext"]
    assert container["securityContext"] == expected["securityContext"]
    assert container["volumeMounts"] == expected["volumeMounts"][:1]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_component_changes_what_the_setting_changes(scheduler: str, tmp_path: Path) -> None:
    """Placed over an overlay, as a person does it."""
    k8s = os.path.relpath(ROOT / "k8s", tmp_path)
    parts = {"resources": [f"{k8s}/overlays/one-node"], "components": [f"{k8s}/components/{scheduler}"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(parts))
    words = overlay_words("one-node")
    settings = [f"cluster.kubernetes.scheduler={scheduler}", "cluster.kubernetes.queue=training"]
    expected = rendered(*words, *settings, name="one-node")
    built = kustomize(tmp_path)["RayJob"]
    expected["spec"]["entrypoint"] = built["spec"]["entrypoint"]  # the driver does not need to know of its scheduler
    assert built == expected
    check_rayjob(built)


def test_the_network_policy_knows_the_pods_of_a_job() -> None:
    policy = yaml.safe_load((ROOT / "k8s" / "base" / "networkpolicy.yaml").read_text())
    selected = policy["spec"]["podSelector"]["matchLabels"]
    templates = pod_templates(rendered("recipe=smoke", "cluster=kuberay"))
    assert len(templates) == 3
    assert all(selected.items() <= template["metadata"]["labels"].items() for template in templates)


@pytest.mark.parametrize("words", all_rayjobs())
def test_pods_have_no_more_rights_than_they_need(words: list[str]) -> None:
    rayjob = rendered(*words)
    for template in pod_templates(rayjob):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] >= 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers", "serviceAccountName"} & pod.keys()
        assert {kind for volume in pod["volumes"] for kind in volume} <= {"name", "emptyDir", "persistentVolumeClaim"}
    for container in containers(rayjob):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "ports" not in container
        assert all(not {"TOKEN", "KEY", "SECRET"} & set(each["name"].split("_")) for each in container.get("env", ()))
        assert container["resources"]["requests"] == container["resources"]["limits"]
    cluster = rayjob["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert (cluster["headGroupSpec"]["serviceType"], cluster["headGroupSpec"]["enableIngress"]) == ("ClusterIP", False)


def test_secrets_are_named_and_not_written() -> None:
    rayjob = rendered(*ADVANCED)
    expected = [{"secretRef": {"name": "hugging-face"}}, {"secretRef": {"name": "wandb"}}]
    ray = [each for each in containers(rayjob) if each["name"] in ("ray-head", "ray-worker")]
    others = [each for each in containers(rayjob) if each not in ray]
    assert [each["envFrom"] for each in ray] == [expected] * 3
    assert others and all("envFrom" not in each for each in others)


def test_the_head_computes_nothing() -> None:
    head = rendered("recipe=grpo_7b", "cluster=kuberay")["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    container = head["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "16Gi"}


def test_sixty_four_gpus() -> None:
    rayjob = rendered("recipe=grpo_32b", "cluster=kuberay_64")
    groups = {each["groupName"]: each for each in rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    gpus = {
        name: (group["replicas"], group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        for name, group in groups.items()
    }
    assert gpus == {"rollout": (4, "8"), "training": (4, "8")}
    assert [group["labels"] for group in groups.values()] == [{"rlflow-pool": "rollout"}, {"rlflow-pool": "training"}]


@settings(max_examples=30, deadline=None)
@given(
    machines=st.integers(1, 64),
    cpus=st.integers(1, 256),
    gpus=st.integers(0, 16),
    memory_gb=st.floats(1, 4096).map(lambda gigabytes: round(gigabytes, 2)),
)
def test_every_size_of_a_pool_arrives(machines: int, cpus: int, gpus: int, memory_gb: float) -> None:
    config = compose_pool(PoolConfig(machines=machines, cpus=cpus, gpus=gpus, memory_gb=memory_gb))
    [group] = render(config, job(config, "recipe=smoke"))["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == machines
    pod = group["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert (limits["cpu"], limits.get("nvidia.com/gpu", "0")) == (str(cpus), str(gpus))
    assert ("tolerations" in pod) == (gpus > 0)
    memory = in_mebibytes(limits["memory"])
    assert abs(memory - memory_gb * 1024) <= 0.5
    [shared] = [each["emptyDir"] for each in pod["volumes"] if each["name"] == "shared-memory"]
    assert shared["medium"] == "Memory"
    assert abs(in_mebibytes(shared["sizeLimit"]) - memory / 2) <= 1


def compose_pool(pool: PoolConfig) -> Config:
    config = Config()
    config.cluster.address = "auto"
    config.cluster.pools = {"workers": pool}
    config.cluster.kubernetes.image = "rlflow:cuda"
    config.cluster.kubernetes.claim = "rlflow"
    return config


def in_mebibytes(quantity: str) -> int:
    return int(quantity[:-2]) * {"Mi": 1, "Gi": 1024}[quantity[-2:]]


def test_each_scheduler_is_told_in_its_own_words() -> None:
    found = {}
    for scheduler in SCHEDULERS:
        rayjob = rendered(
            "recipe=smoke",
            "cluster=kuberay",
            f"cluster.kubernetes.scheduler={Scheduler(scheduler).value}",
            "cluster.kubernetes.queue=team-a",
        )
        label = {k: v for k, v in rayjob["metadata"]["labels"].items() if not k.startswith("app.kubernetes.io/")}
        found[scheduler] = (label, rayjob["spec"].get("suspend", False), rayjob["spec"]["submissionMode"])
    assert found == {
        "kueue": ({"kueue.x-k8s.io/queue-name": "team-a"}, True, "K8sJobMode"),
        "volcano": ({"volcano.sh/queue-name": "team-a"}, False, "K8sJobMode"),
        "kai": ({"kai.scheduler/queue": "team-a"}, False, "SidecarMode"),
    }


def test_a_lost_head_is_made_up_for() -> None:
    spec = rendered("recipe=smoke", "cluster=kuberay", "cluster.kubernetes.retries=5")["spec"]
    assert spec["backoffLimit"] == 5
    assert spec["submitterConfig"] == {"backoffLimit": 2}
    assert "activeDeadlineSeconds" not in spec
    assert spec["shutdownAfterJobFinishes"] is True and spec["ttlSecondsAfterFinished"] > 0


def test_pods_end_when_the_run_is_saved() -> None:
    rayjob = rendered("recipe=smoke", "cluster=kuberay", "deadlines.checkpoint_s=90.5", "run.dir=/rlflow/runs/smoke-1")
    head, worker, _ = (template["spec"] for template in pod_templates(rayjob))
    stop = head["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert stop == ["rlflow", "stop", "/rlflow/runs/smoke-1", "--timeout", "3481"]
    wait = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert wait == ["flock", "--shared", "--wait", "3481", "/rlflow/runs/smoke-1/.lock", "true"]
    assert head["terminationGracePeriodSeconds"] == worker["terminationGracePeriodSeconds"] == 3541
    assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "3481"} in head["containers"][0]["env"]


def test_other_pods_wait_for_the_lock_of_the_run(tmp_path: Path) -> None:
    """The commands themselves, with a folder of this machine, and no time to wait."""
    rayjob = rendered("recipe=smoke", "cluster=kuberay", "run.dir=/rlflow/runs/smoke-1")
    head, worker, _ = (template["spec"] for template in pod_templates(rayjob))
    folder, here = "/rlflow/runs/smoke-1", str(tmp_path / "smoke-1")
    make, wait = (
        [word.replace(folder, here).replace("6900", "0") for word in command]
        for command in (
            head["initContainers"][0]["command"],
            worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"],
        )
    )
    assert subprocess.run(make, check=False, timeout=60).returncode == 0
    assert subprocess.run(wait, check=False, timeout=60).returncode == 0
    with claim_of(here):
        assert subprocess.run(wait, check=False, timeout=60).returncode == 1
        assert subprocess.run(make, check=False, timeout=60).returncode == 0  # the driver says who holds it


@contextmanager
def claim_of(run_dir: str) -> Iterator[None]:
    config = Config()
    config.run.dir = run_dir
    with claim(config):
        yield


def test_words_reach_the_driver_as_they_were_given() -> None:
    """KubeRay pastes the entrypoint into a command for bash; `ray job submit` quotes what arrives for a shell again."""
    words = (
        "rlflow",
        "train",
        "run.name=a b",
        "cluster.kubernetes.secrets=[x,y]",
        'env.args={path: "it\'s here.jsonl", glob: *.txt}',
        "model.path=$HOME/`id`;echo",
        "x=a\\b",
        "y=",
        "#z",
    )
    config = compose_pool(PoolConfig(machines=1, cpus=1, gpus=0, memory_gb=1))
    entrypoint = render(config, Job(name="j", run_dir=f"{RUNS}/j", words=words))["spec"]["entrypoint"]
    submitted = words_after("bash", entrypoint)
    assert words_after("sh", shlex.join(submitted)) == list(words)


def words_after(shell: str, line: str) -> list[str]:
    printed = subprocess.run([shell, "-c", f"printf '%s\\0' {line}"], check=True, capture_output=True, text=True)
    return printed.stdout.split("\0")[:-1]


def test_yaml_says_the_same() -> None:
    rayjob = rendered(*ADVANCED)
    text = to_yaml(rayjob)
    assert yaml.safe_load(text) == rayjob
    assert "&id" not in text and text.startswith("apiVersion: ray.io/v1\nkind: RayJob\n")


@pytest.mark.parametrize("on_exists", ["fresh", "fail"])
def test_a_retry_can_only_go_on(on_exists: str) -> None:
    with pytest.raises(ConfigError, match=f"run.on_exists={on_exists} contradicts .*; set it to resume"):
        checked("recipe=smoke", "cluster=kuberay", f"run.on_exists={on_exists}")


def test_names_that_kubernetes_would_refuse_are_refused_first() -> None:
    config = compose_pool(PoolConfig(machines=1, cpus=1, gpus=0, memory_gb=1))
    config.cluster.pools["Big_Ones"] = config.cluster.pools["workers"]
    with pytest.raises(ConfigError) as refused:
        render(config, job(config))
    assert str(refused.value) == (
        "cluster.pools.Big_Ones becomes part of the names of pods; take up to 30 lower-case letters, digits and "
        "hyphens, the first one a letter"
    )


def test_a_run_directory_is_a_plain_path() -> None:
    config = compose_pool(PoolConfig(machines=1, cpus=1, gpus=0, memory_gb=1))
    config.run.dir = "/rlflow/runs/a b"
    with pytest.raises(ConfigError) as refused:
        render(config, job(config))
    assert str(refused.value) == (
        "run.dir=/rlflow/runs/a b has characters that a shell changes; take letters, digits, - _ . and /"
    )
