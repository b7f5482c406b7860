"""RayJobs of a cluster that the user's kubeconfig names: apply, follow, stop.

    cluster = Kubernetes(namespace=None)
    cluster.apply(rayjob)
    exit_code = cluster.follow("grpo-20260101-120000")

A job is followed by looking at its RayJob, its pods and the driver's log in turn. A log that breaks off, or is silent
for long, is asked for again from where it was: its connection may be dead without anybody saying so.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from rlflow.errors import ConfigError
from rlflow.tools.submit.command_words import LOST, MaybeStarted, how_to_go_on, on_kubernetes
from rlflow.tools.submit.kuberay import SUBMITTER, Tree
from rlflow.tools.submit.kubernetes_client import Client, Refused, Unreachable
from rlflow.tools.submit.rayjob_state import Position, State, log_place, newest_with_log, state_of, waiting_for

_KUEUE = "kueue.x-k8s.io"
_MERGE = "application/merge-patch+json"
_METADATA_ONLY = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
_WATCH_SECONDS = 20
"""After this long without a change, pods are looked at again; their log may have begun."""
_SILENT_SECONDS = 120
"""A log without new lines for so long is asked for again."""


@dataclass(slots=True)
class _Log:
    """How far the log of a driver was shown."""

    pod: str | None = None
    """None before it has begun."""
    position: Position = field(default_factory=Position)
    read: set[str] = field(default_factory=set)
    """Pods whose log has ended and was shown whole."""


class Kubernetes:
    """One namespace. Raises ConfigError without a kubeconfig, or without the package `kubernetes`."""

    def __init__(self, namespace: str | None, show: Callable[[str], None] | None = None) -> None:
        self._client = Client()
        self._namespace = namespace or self._client.namespace
        self._show = show or (lambda text: print(text, flush=True))
        self._rayjobs = ("ray.io", "v1", self._namespace, "rayjobs")

    def apply(self, rayjob: Tree) -> None:
        """Make a RayJob. Raises ConfigError when KubeRay, the claim or a secret is missing, when there is a RayJob of
        that name, and for what else the API server refuses, MaybeStarted when it does not say so."""
        core, objects = self._client.core, self._client.objects
        if self._look(objects.get_api_resources, "ray.io", "v1") is None:
            raise ConfigError(
                "this cluster has no RayJobs: the KubeRay operator is not installed; docs/kubernetes.md says how"
            )
        name, pod = rayjob["metadata"]["name"], rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" not in volume:
                continue
            claim = volume["persistentVolumeClaim"]["claimName"]
            found = self._look(core.read_namespaced_persistent_volume_claim, claim, self._namespace)
            if found is None:
                raise ConfigError(
                    f"namespace {self._namespace} has no PersistentVolumeClaim {claim}; make one (k8s/base has an "
                    "example), or name yours in cluster.kubernetes.claim"
                )
            modes = found.get("spec", {}).get("accessModes", ["ReadWriteMany"])
            if "ReadWriteMany" not in modes:
                self._show(f"claim {claim} is {', '.join(modes)}: all pods have to be on one node")
        for source in pod["containers"][0].get("envFrom", ()):
            secret = source["secretRef"]["name"]
            if self._look(core.read_namespaced_secret, secret, self._namespace, _headers=_METADATA_ONLY) is None:
                raise ConfigError(
                    f"namespace {self._namespace} has no Secret {secret}; make it: kubectl create secret generic "
                    f"{secret} --from-literal=KEY=VALUE, or leave it out of cluster.kubernetes.secrets"
                )
        try:
            # Strict: an operator that is too old to know a field would otherwise drop it, authentication for example.
            self._client.ask(objects.create_namespaced_custom_object, *self._rayjobs, rayjob, field_validation="Strict")
        except Unreachable as error:
            raise MaybeStarted(str(error)) from error
        except Refused as refusal:
            if refusal.status >= 500:
                raise MaybeStarted(str(refusal)) from refusal
            self._explain(refusal, name)
        self._show(f"RayJob {name} is in namespace {self._namespace}")

    def follow(self, name: str) -> int:
        """Show what becomes of a RayJob and the log of its driver, until it ends; the exit code that it stands for.

        Ctrl-C only ends the following: 0. LOST when the API server cannot be reached for minutes, or does not let us
        look. Raises ConfigError when there is no such RayJob.
        """
        try:
            return self._follow(name)
        except KeyboardInterrupt:
            why, code = f"\nno longer following; {name} goes on", 0
        except Unreachable as error:
            why, code = f"{error}; {name} may well go on", LOST
        except Refused as refusal:
            why, code = f"{name} cannot be followed, and may well go on; {refusal}", LOST
        self._show(f"{why}\n{self._how_to_go_on(name)}")
        return code

    def stop(self, name: str) -> str:
        """Have a RayJob end its pods, which save first; says what was done. It can be let go again.

        Raises ConfigError when there is no such RayJob.
        """
        try:
            rayjob = self._get(name)
            state = self._state(rayjob)
            if state.exit_code is not None:
                return f"{name} has ended already: {state}"
            if state.queued_by_kueue:  # it would let the job go again; its Workload is what it looks at
                kind, workloads = self._workloads(rayjob)
                field, stopped, names = "active", False, [workload["metadata"]["name"] for workload in workloads]
            else:
                kind, field, stopped, names = self._rayjobs, "suspend", True, [name]
            for each in names:
                patch = self._client.objects.patch_namespaced_custom_object
                self._client.ask(patch, *kind, each, {"spec": {field: stopped}}, _content_type=_MERGE)
        except Refused as refusal:
            self._explain(refusal, name)
        what, again = kind[-1].removesuffix("s"), json.dumps({"spec": {field: not stopped}})
        return (
            f"{name} stops: its driver finishes the step in hand and saves, then its pods end. To go on with it: "
            f"kubectl patch {what} {' '.join(names)} --type merge -p '{again}'; or submit the same words with the same "
            "run.dir"
        )

    def _look(self, read: Callable[..., Any], *arguments: str, **options: Any) -> Tree | None:
        """None if there is no such thing; empty if we may not look at it, so that only the pods will tell."""
        try:
            return self._client.ask(read, *arguments, **options)
        except Refused as refusal:
            if refusal.status in (403, 404):
                return {} if refusal.status == 403 else None
            self._explain(refusal, arguments[0])

    def _explain(self, refusal: Refused, name: str) -> NoReturn:
        said = str(refusal)
        if refusal.status == 409:
            said = (
                f"there is a RayJob {name} in namespace {self._namespace} already; it is left as it is: submit "
                f"again under another name, or\n{self._how_to_go_on(name)}"
            )
        elif refusal.status in (401, 403):
            said = f"this is not allowed in namespace {self._namespace}; {said}"
        elif refusal.status in (400, 422):
            said = f"the RayJob was refused, by an operator older than KubeRay 1.6 or a rule of the cluster; {said}"
        raise ConfigError(said) from refusal

    def _how_to_go_on(self, name: str) -> str:
        return how_to_go_on(name, on_kubernetes(self._namespace))

    def _get(self, name: str) -> Tree:
        """Raises ConfigError when there is no such RayJob, Refused for all else."""
        try:
            return self._client.ask(self._client.objects.get_namespaced_custom_object, *self._rayjobs, name)
        except Refused as refusal:
            if refusal.status != 404:
                raise
            raise ConfigError(
                f"there is no RayJob {name} in namespace {self._namespace}; kubectl get rayjobs lists those there are"
            ) from refusal

    def _workloads(self, rayjob: Tree) -> tuple[tuple[str, str, str, str], list[Tree]]:
        """Where Kueue's Workloads are, and those of a RayJob: one, as soon as Kueue has seen it."""
        version = self._client.get(f"/apis/{_KUEUE}")["preferredVersion"]["version"]
        kind = (_KUEUE, version, self._namespace, "workloads")
        selector = f"{_KUEUE}/job-uid={rayjob['metadata']['uid']}"
        listing = self._client.objects.list_namespaced_custom_object
        return kind, self._client.ask(listing, *kind, label_selector=selector)["items"]

    def _state(self, rayjob: Tree) -> State:
        state = state_of(rayjob)
        if not state.waits_in_queue:
            return state
        try:
            _, workloads = self._workloads(rayjob)
        except Refused as refusal:
            if refusal.status not in (403, 404):
                raise
            return state  # without the right to look at Workloads, it seems to wait
        active = [workload.get("spec", {}).get("active", True) for workload in workloads]
        return replace(state, deactivated=bool(active) and not any(active))

    def _follow(self, name: str) -> int:
        shown: State | None = None
        log = _Log()
        pending = ""
        while True:
            rayjob = self._get(name)
            state = self._state(rayjob)
            if state.exit_code is not None:
                self._show_log(rayjob, log)
                self._show(f"{name}: {state}")
                return state.exit_code
            if state != shown:
                self._show(f"{name}: {state}")
                shown = state
            self._show_log(rayjob, log)
            now_pending = ""
            if log.pod is None and state.cluster:
                now_pending = waiting_for(self._pods(f"ray.io/cluster={state.cluster}"))
            if now_pending not in ("", pending):
                self._show(f"{name}: {now_pending}")
            pending = now_pending
            try:
                version = rayjob["metadata"]["resourceVersion"]
                self._client.wait_for_change(self._rayjobs, name, version, _WATCH_SECONDS)
            except Refused as refusal:
                if refusal.status != 410:  # that version is too long ago
                    raise
            except Unreachable:
                pass  # the next look tells whether the server can be reached at all

    def _pods(self, selector: str) -> list[Tree]:
        core = self._client.core
        return self._client.ask(core.list_namespaced_pod, self._namespace, label_selector=selector)["items"]

    def _show_log(self, rayjob: Tree, log: _Log) -> None:
        """What is new in the driver's log, until its pod ends or nothing more comes."""
        selector = log_place(rayjob)
        found = newest_with_log(self._pods(selector)) if selector else None
        if found is None or found[0]["uid"] in log.read:
            return
        pod, has_ended = found
        if pod["uid"] != log.pod:
            if log.pod is not None:
                self._show("the log from its beginning, from another pod:")
            log.pod, log.position = pod["uid"], Position()
        query = {"container": SUBMITTER, "follow": "true", "timestamps": "true"} | log.position.query()
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pod['name']}/log"
        try:
            with self._client.lines(path, query, silent_s=_SILENT_SECONDS) as lines:
                for line in lines:
                    text = log.position.advance(line)
                    if text is not None:
                        self._show(text)
        except (Unreachable, Refused):
            return  # broken off, or the pod is gone; the state of the job tells what became of it
        if has_ended:
            log.read.add(pod["uid"])
