"""A RayJob, its pods and the lines of their logs -> the state of a run. Pure."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.tools.submit.command_words import INTERRUPTED, STOPPED
from rlflow.tools.submit.kuberay import SUBMITTER, Tree

_MEANINGS = {
    "": "KubeRay has not seen it yet; is its operator running?",
    "Initializing": "pods start",
    "Waiting": "waits for its job",
    "Running": "pods run",
    "Retrying": "it failed and is started again; it goes on from the last checkpoint",
    "Suspending": "pods end; the driver saves",
    "Suspended": "stopped; it can be let go again",
    "Complete": "ended",
    "Failed": "failed",
}

_ENDED_BY_SIGNAL = re.compile(rf"Job entrypoint command failed with exit code ({INTERRUPTED:d}|{STOPPED:d})\b")
"""As Ray says it, and KubeRay passes it on."""
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?Z ?(.*)", re.DOTALL)


@dataclass(kw_only=True, slots=True, frozen=True)
class State:
    deployment: str
    """`jobDeploymentStatus`: what KubeRay does."""
    job: str
    """`jobStatus`: what the driver does."""
    failures: int
    cluster: str
    """Name of its RayCluster; empty while it has none."""
    message: str
    queued_by_kueue: bool
    deactivated: bool = False
    """Its Workload says that Kueue does not let it go by itself any more."""

    @property
    def exit_code(self) -> int | None:
        """None while it goes on."""
        if self.deployment == "Suspended" and not self.waits_in_queue:
            return STOPPED
        if self.deployment not in ("Complete", "Failed"):
            return None
        if self.job == "FAILED" and (ended := _ENDED_BY_SIGNAL.match(self.message)):
            return int(ended[1])
        return {"SUCCEEDED": 0, "STOPPED": STOPPED}.get(self.job, 1)

    @property
    def waits_in_queue(self) -> bool:
        return self.deployment == "Suspended" and self.queued_by_kueue and not self.deactivated

    def __str__(self) -> str:
        meaning = _MEANINGS.get(self.deployment, "")
        if self.waits_in_queue:
            meaning = "waits in its queue"
        words = [meaning, f"job {self.job}" if self.job else ""]
        if self.failures:
            words.append(f"failed {self.failures} {'time' if self.failures == 1 else 'times'}")
        if self.deployment == "Failed" or self.failures:
            words.append(self.message)
        return "; ".join(word for word in words if word)


def state_of(rayjob: Tree) -> State:
    status = rayjob.get("status") or {}
    return State(
        deployment=status.get("jobDeploymentStatus", ""),
        job=status.get("jobStatus", ""),
        failures=status.get("failed") or 0,
        cluster=status.get("rayClusterName", ""),
        message=status.get("message", ""),
        queued_by_kueue="kueue.x-k8s.io/queue-name" in (rayjob["metadata"].get("labels") or {}),
    )


def log_place(rayjob: Tree) -> str:
    """A selector of the pods that may have the driver's log; empty while there are none."""
    if rayjob["spec"].get("submissionMode") == "SidecarMode":
        cluster = state_of(rayjob).cluster
        return f"ray.io/cluster={cluster},ray.io/node-type=head" if cluster else ""
    return f"job-name={rayjob['metadata']['name']}"


def newest_with_log(pods: Sequence[Tree]) -> tuple[Tree, bool] | None:
    """Metadata of the last pod made of those whose submitter has started, and whether it has ended: the log is whole.

    None when no submitter has started.
    """
    for pod in sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"], reverse=True):
        for container in pod.get("status", {}).get("containerStatuses") or ():
            state = container.get("state", {})
            if container["name"] == SUBMITTER and ("running" in state or "terminated" in state):
                return pod["metadata"], "terminated" in state
    return None


def waiting_for(pods: Sequence[Tree]) -> str:
    """What keeps pods from starting, such as a lack of GPUs or of an image; empty when nothing does."""
    reasons = Counter(reason for pod in pods if (reason := _reason(pod.get("status", {}))))
    return "; ".join(f"{count} {'pod waits' if count == 1 else 'pods wait'}: {why}" for why, count in reasons.items())


def _reason(status: Tree) -> str:
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("message") or condition.get("reason", "")
    containers = (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
    for container in containers:
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return f"{waiting['reason']} {waiting.get('message', '')}".strip()
    return ""


class Position:
    """Where one was in a log with timestamps: after the last line that was read."""

    def __init__(self) -> None:
        self._last = ("", "")
        self._catching_up = False

    def advance(self, line: str) -> str | None:
        """The text of a line such as `2026-01-31T12:00:00.5Z text`; None when it was read before."""
        match = _LOG_LINE.fullmatch(line)
        if match is None:
            return line  # a message of the server's own
        moment = (match[1], (match[2] or "").ljust(9, "0"))
        self._catching_up = self._catching_up and moment <= self._last
        if self._catching_up:
            return None
        self._last = moment
        return match[3]

    def query(self) -> dict[str, str]:
        """What to ask the API server for, so that it need not send everything again.

        It takes whole seconds; what was seen of the first one is left out by its timestamp.
        """
        second, _ = self._last
        if not second:
            return {}
        self._catching_up = True
        return {"sinceTime": f"{second}Z"}
