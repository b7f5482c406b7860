"""RayJobs of a cluster that the user's kubeconfig names: apply, follow, stop.

cluster = Kubernetes(namespace=None)
cluster.apply(rayjob)
exit_code = cluster.follow("grpo-20260101-120000")
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn

from rlflow.errors import ConfigError
from rlflow.tools.submit.exit_codes import LOST
from rlflow.tools.submit.job import MaybeStarted
from rlflow.tools.submit.kubernetes_client import Client, Refused, Unreachable
from rlflow.tools.submit.pods import Tree
from rlflow.tools.submit.rayjob_state import State, log_place, newest_with_log, state_of, waiting_for
from rlflow.tools.submit.timestamps import Position
from rlflow.tools.submit.words import how_to_go_on, on_kubernetes

_RAYJOBS = "/apis/ray.io/v1/namespaces/{namespace}/rayjobs"
_KUEUE = "/apis/kueue.x-k8s.io"
_WATCH_SECONDS = 20
"""After this long without a change, pods are looked at again; their log may have begun."""
_SILENT_SECONDS = 120
"""A log that says nothing for so long is asked for anew: its connection may be dead without anybody saying so."""

Show = Callable[[str], None]


def _print(text: str) -> None:
    print(text, flush=True)


class Kubernetes:
    """One namespace. Raises ConfigError without a kubeconfig, or without the package `kubernetes`."""

    def __init__(self, namespace: str | None, show: Show = _print) -> None:
        self._client = Client()
        self._namespace = namespace or self._client.namespace
        self._show = show

    def apply(self, rayjob: Tree) -> None:
        """Make a RayJob. Raises ConfigError when KubeRay, the claim or a secret is missing, when there is a RayJob of
        that name, and for what else the API server refuses, MaybeStarted when it does not say so."""
        self._check_kuberay()
        pod = rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                self._check_claim(volume["persistentVolumeClaim"]["claimName"])
        for source in pod["containers"][0].get("envFrom", ()):
            self._check_secret(source["secretRef"]["name"])
        name = rayjob["metadata"]["name"]
        try:
            # Strict: an operator that is too old to know a field would otherwise drop it, authentication for example.
            self._client.post(self._rayjobs, rayjob, {"fieldValidation": "Strict"})
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
            self._show(f"\nno longer following; {name} goes on\n{self._how_to_go_on(name)}")
            return 0
        except Unreachable as error:
            self._show(f"{error}; {name} may well go on\n{self._how_to_go_on(name)}")
            return LOST
        except Refused as refusal:
            self._show(f"{name} cannot be followed, and may well go on; {refusal}\n{self._how_to_go_on(name)}")
            return LOST

    def stop(self, name: str) -> str:
        """Have a RayJob end its pods, which save first; says what was done. It can be let go again.

        Raises ConfigError when there is no such RayJob.
        """
        try:
            rayjob = self._get(name)
            state = self._state(rayjob)
            if state.exit_code is not None:
                return f"{name} has ended already: {state}"
            again = self._deactivate(rayjob) if state.queued_by_kueue else self._suspend(name)
        except Refused as refusal:
            self._explain(refusal, name)
        return (
            f"{name} stops: its driver finishes the step in hand and saves, then its pods end. To go on with it: "
            f"{again}; or submit the same words with the same run.dir"
        )

    @property
    def _rayjobs(self) -> str:
        return _RAYJOBS.format(namespace=self._namespace)

    def _check_kuberay(self) -> None:
        try:
            self._client.get("/apis/ray.io/v1")
        except Refused as refusal:
            if refusal.status != 404:
                self._explain(refusal, "")
            raise ConfigError(
                "this cluster has no RayJobs: the KubeRay operator is not installed; docs/kubernetes.md says how"
            ) from refusal

    def _check_claim(self, name: str) -> None:
        claim = self._look(f"persistentvolumeclaims/{name}")
        if claim is None:
            raise ConfigError(
                f"namespace {self._namespace} has no PersistentVolumeClaim {name}; make one (k8s/base has an example), "
                "or name yours in cluster.kubernetes.claim"
            )
        modes = claim.get("spec", {}).get("accessModes", ["ReadWriteMany"])
        if "ReadWriteMany" not in modes:
            self._show(f"claim {name} is {', '.join(modes)}: all pods have to be on one node")

    def _check_secret(self, name: str) -> None:
        if self._look(f"secrets/{name}", only_metadata=True) is None:
            raise ConfigError(
                f"namespace {self._namespace} has no Secret {name}; make it: kubectl create secret generic {name} "
                "--from-literal=KEY=VALUE, or leave it out of cluster.kubernetes.secrets"
            )

    def _look(self, path: str, *, only_metadata: bool = False) -> Tree | None:
        """None where there is no such thing; empty where it may not be looked at, so that only the pods will tell."""
        try:
            return self._client.get(f"/api/v1/namespaces/{self._namespace}/{path}", only_metadata=only_metadata)
        except Refused as refusal:
            if refusal.status in (403, 404):
                return {} if refusal.status == 403 else None
            self._explain(refusal, path)

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
            return self._client.get(f"{self._rayjobs}/{name}")
        except Refused as refusal:
            if refusal.status != 404:
                raise
            raise ConfigError(
                f"there is no RayJob {name} in namespace {self._namespace}; kubectl get rayjobs lists those there are"
            ) from refusal

    def _suspend(self, name: str) -> str:
        """How to let it go again."""
        self._client.patch(f"{self._rayjobs}/{name}", {"spec": {"suspend": True}})
        return f"kubectl patch rayjob {name} --type merge -p '{json.dumps({'spec': {'suspend': False}})}'"

    def _deactivate(self, rayjob: Tree) -> str:
        """Kueue lets a job go again that was suspended by somebody else; its Workload is what it looks at."""
        path, workloads = self._workloads(rayjob)
        names = [workload["metadata"]["name"] for workload in workloads]
        for name in names:
            self._client.patch(f"{path}/{name}", {"spec": {"active": False}})
        active = json.dumps({"spec": {"active": True}})
        return f"kubectl patch workload {' '.join(names)} --type merge -p '{active}'"

    def _workloads(self, rayjob: Tree) -> tuple[str, list[Tree]]:
        """Where Kueue's Workloads are, and those of a RayJob: one, as soon as Kueue has seen it."""
        version = self._client.get(_KUEUE)["preferredVersion"]["version"]
        path = f"{_KUEUE}/{version}/namespaces/{self._namespace}/workloads"
        selector = {"labelSelector": f"kueue.x-k8s.io/job-uid={rayjob['metadata']['uid']}"}
        return path, self._client.get(path, selector)["items"]

    def _state(self, rayjob: Tree) -> State:
        state = state_of(rayjob)
        if not state.waits_in_queue:
            return state
        try:
            _, workloads = self._workloads(rayjob)
        except Refused as refusal:
            if refusal.status not in (403, 404):
                raise
            return state  # who may not look at Workloads sees it wait
        active = [workload.get("spec", {}).get("active", True) for workload in workloads]
        return replace(state, deactivated=bool(active) and not any(active))

    def _follow(self, name: str) -> int:
        shown: State | None = None
        log = _Log()
        pending = ""
        for rayjob in self._states(name):
            state = self._state(rayjob)
            if state.exit_code is not None:
                self._show_log(rayjob, log)
                self._show(f"{name}: {state}")
                return state.exit_code
            if state != shown:
                self._show(f"{name}: {state}")
                shown = state
            self._show_log(rayjob, log)
            now_pending = "" if log.begun else self._pending(state)
            if now_pending not in ("", pending):
                self._show(f"{name}: {now_pending}")
            pending = now_pending
        raise AssertionError("a RayJob has states until it ends")

    def _states(self, name: str) -> Iterator[Tree]:
        """The RayJob, and again whenever it may have changed or some time has passed."""
        while True:
            rayjob = self._get(name)
            yield rayjob
            selector = {
                "watch": "true",
                "fieldSelector": f"metadata.name={name}",
                "resourceVersion": rayjob["metadata"]["resourceVersion"],
                "timeoutSeconds": str(_WATCH_SECONDS),
            }
            try:
                with self._client.stream(self._rayjobs, selector, silent_s=_WATCH_SECONDS + 10) as lines:
                    next(lines, None)
            except Refused as refusal:
                if refusal.status != 410:  # that version is too long ago
                    raise
            except Unreachable:
                continue  # whether it can be reached at all, the next look tells

    def _pending(self, state: State) -> str:
        """Why pods do not start; empty when they do."""
        if not state.cluster:
            return ""
        pods = self._pods(f"ray.io/cluster={state.cluster}")
        return waiting_for(pods)

    def _pods(self, selector: str) -> list[Tree]:
        return self._client.get(f"/api/v1/namespaces/{self._namespace}/pods", {"labelSelector": selector})["items"]

    def _show_log(self, rayjob: Tree, log: _Log) -> None:
        """What is new in the driver's log, until its pod ends or nothing more comes."""
        selector = log_place(rayjob)
        pod = newest_with_log(self._pods(selector)) if selector else None
        if pod is None or pod.uid in log.read:
            return
        if pod.uid != log.pod:
            if log.begun:
                self._show("the log from its beginning, from another pod:")
            log.pod, log.position = pod.uid, Position()
        query = {"container": pod.container, "follow": "true", "timestamps": "true"} | log.position.query()
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pod.name}/log"
        try:
            with self._client.stream(path, query, silent_s=_SILENT_SECONDS) as lines:
                for line in lines:
                    text = log.position.advance(line)
                    if text is not None:
                        self._show(text)
        except (Unreachable, Refused):
            return  # broken off, or the pod is gone; the state of the job tells what became of it
        if pod.ended:
            log.read.add(pod.uid)


class _Log:
    """How far the log of a driver was shown."""

    def __init__(self) -> None:
        self.pod: str | None = None
        self.position = Position()
        self.read: set[str] = set()
        """Pods whose log has ended and was shown whole."""

    @property
    def begun(self) -> bool:
        return self.pod is not None
