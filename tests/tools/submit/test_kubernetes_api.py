"""Applying, following and stopping RayJobs, against a server that speaks as much of the Kubernetes API as they need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes_schemas import Tree
from kubernetes_server import Server, serving
from rayjobs import rendered

from rlflow.errors import ConfigError, RunError
from rlflow.tools.submit import kubernetes_client
from rlflow.tools.submit.command_words import MaybeStarted
from rlflow.tools.submit.kubernetes_api import Kubernetes
from rlflow.tools.submit.rayjob_state import Position, newest_with_log, state_of, waiting_for

pytest.importorskip("kubernetes")

Step = Callable[[Server], None]
NAME = "smoke-1"
HINTS = (
    "follow it: rlflow submit --attach smoke-1 cluster=kuberay cluster.kubernetes.namespace=research\n"
    "stop it:   rlflow submit --stop smoke-1 cluster=kuberay cluster.kubernetes.namespace=research"
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(kubernetes_client, "_TRIES", 1)
    monkeypatch.setattr(kubernetes_client, "_PAUSE_SECONDS", 0)
    with serving(Server()) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig(tmp_path)))
        yield running


def rayjob(*words: str) -> Tree:
    return rendered("recipe=smoke", "cluster=kuberay", *words, name=NAME)


def submitted(server: Server, *steps: Step, words: tuple[str, ...] = ()) -> list[str]:
    """Apply a job, of which the first step is there at once; what is shown from then on is added to the list."""
    shown: list[str] = []
    Kubernetes(None, shown.append).apply(rayjob(*words))
    shown.clear()
    server.steps = list(steps)
    server.move_on()
    return shown


def job_is(deployment: str, job: str = "", **more: object) -> Step:
    def step(server: Server) -> None:
        names = {"jobDeploymentStatus": deployment, "jobStatus": job, "rayClusterName": "smoke-1-abcde"}
        server.rayjobs[NAME]["status"] = names | more

    return step


def pods_are(*pods: Tree) -> Step:
    def step(server: Server) -> None:
        server.pods = list(pods)

    return step


def follow(shown: list[str]) -> int:
    return Kubernetes(None, shown.append).follow(NAME)


def pod(name: str, made: str, state: Tree, **labels: str) -> Tree:
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-of-{name}",
            "creationTimestamp": made,
            "labels": {"job-name": NAME} | labels,
        },
        "status": {"containerStatuses": [{"name": "ray-job-submitter", "state": state}]},
    }


RUNNING = job_is("Running", "RUNNING")
ENDED = "Job entrypoint command failed with exit code"
SUCCEEDED = job_is("Complete", "SUCCEEDED")


def test_a_job_is_made_in_the_namespace_of_the_kubeconfig(server: Server) -> None:
    shown: list[str] = []
    Kubernetes(None, shown.append).apply(rayjob())
    assert shown == ["RayJob smoke-1 is in namespace research"]
    assert server.rayjobs[NAME]["spec"] == rayjob()["spec"]


def test_a_missing_operator_claim_or_secret_is_said_before_anything_is_made(server: Server) -> None:
    with pytest.raises(ConfigError, match="no Secret hf; make it: kubectl create secret generic hf"):
        Kubernetes(None).apply(rayjob("cluster.kubernetes.secrets=[hf]"))
    assert server.accepted == ["application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"]  # and not its values
    server.claims.clear()
    with pytest.raises(ConfigError, match="namespace research has no PersistentVolumeClaim rlflow; make one"):
        Kubernetes(None).apply(rayjob())
    server.has_kuberay = False
    with pytest.raises(ConfigError, match="the KubeRay operator is not installed; docs/kubernetes.md says how"):
        Kubernetes(None).apply(rayjob())
    assert server.rayjobs == {}


def test_who_may_not_look_at_claims_and_secrets_may_still_submit(server: Server) -> None:
    server.refuse = {("GET", "/secrets/hf"): (403, "forbidden"), ("GET", "/persistentvolumeclaims/rlflow"): (403, "no")}
    Kubernetes(None).apply(rayjob("cluster.kubernetes.secrets=[hf]"))
    assert NAME in server.rayjobs


def test_a_claim_for_one_node_is_pointed_out(server: Server) -> None:
    server.claims = {"rlflow": ["ReadWriteOnce"]}
    shown: list[str] = []
    Kubernetes(None, shown.append).apply(rayjob())
    assert shown[0] == "claim rlflow is ReadWriteOnce: all pods have to be on one node"


def test_a_job_of_that_name_is_left_alone(server: Server) -> None:
    Kubernetes(None).apply(rayjob())
    before = dict(server.rayjobs[NAME])
    with pytest.raises(ConfigError) as refused:
        Kubernetes(None).apply(rayjob("run.steps=7"))
    assert str(refused.value) == (
        "there is a RayJob smoke-1 in namespace research already; it is left as it is: submit again under another "
        f"name, or\n{HINTS}"
    )
    assert server.rayjobs[NAME] == before


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, "this is not allowed in namespace research; the API server said 403: because"),
        (
            422,
            "the RayJob was refused, by an operator older than KubeRay 1.6 or a rule of the cluster; the API server "
            "said 422: because",
        ),
        (429, "the API server said 429: because"),
    ],
)
def test_what_the_api_server_says_is_passed_on(server: Server, status: int, message: str) -> None:
    server.refuse = {("POST", "/rayjobs"): (status, "because")}
    with pytest.raises(ConfigError) as refused:
        Kubernetes(None).apply(rayjob())
    assert str(refused.value) == message


def test_an_answer_that_does_not_say_whether_there_is_a_job(server: Server) -> None:
    server.refuse = {("POST", "/rayjobs"): (504, "took too long")}
    with pytest.raises(MaybeStarted, match="the API server said 504: took too long"):
        Kubernetes(None).apply(rayjob())


def test_a_job_is_followed_to_its_end(server: Server) -> None:
    lack = {
        "type": "PodScheduled",
        "status": "False",
        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu",
    }
    worker = {"metadata": {"labels": {"ray.io/cluster": "smoke-1-abcde"}}, "status": {"conditions": [lack]}}
    server.logs = {"smoke-1-x": [["2026-01-31T12:00:01Z step 1", "2026-01-31T12:00:02.5Z step 2"]]}
    shown = submitted(
        server,
        pods_are(worker),
        job_is("Initializing"),
        RUNNING,
        pods_are(pod("smoke-1-x", "2026-01-31T12:00:00Z", {"waiting": {}})),
        pods_are(pod("smoke-1-x", "2026-01-31T12:00:00Z", {"running": {}})),
        SUCCEEDED,
    )
    assert follow(shown) == 0
    assert shown == [
        "smoke-1: KubeRay has not seen it yet; is its operator running?",
        "smoke-1: pods start",
        "smoke-1: 1 pod waits: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu",
        "smoke-1: pods run; job RUNNING",
        "step 1",
        "step 2",
        "smoke-1: ended; job SUCCEEDED",
    ]


def test_a_log_that_breaks_off_goes_on_where_it_was(server: Server) -> None:
    first = ["2026-01-31T12:00:01Z one", "2026-01-31T12:00:02Z two"]
    server.logs = {"smoke-1-x": [[*first, "CUT"], [*first, "CUT"], [*first, "2026-01-31T12:00:02.000000001Z three"]]}
    server.pods = [pod("smoke-1-x", "2026-01-31T12:00:00Z", {"running": {}})]
    shown = submitted(server, RUNNING, RUNNING, RUNNING, SUCCEEDED)
    assert follow(shown) == 0
    assert shown == ["smoke-1: pods run; job RUNNING", "one", "two", "three", "smoke-1: ended; job SUCCEEDED"]
    logs = [query for _, path, query in server.asked if path.endswith("/log")]
    assert [query.get("sinceTime") for query in logs[:2]] == [None, "2026-01-31T12:00:02Z"]


def test_the_log_of_the_next_submitter_is_shown_too(server: Server) -> None:
    """A lost head ends the log of the first one."""
    first = pod("smoke-1-x", "2026-01-31T12:00:00Z", {"terminated": {}})
    second = pod("smoke-1-y", "2026-01-31T12:05:00Z", {"terminated": {}})
    server.logs = {"smoke-1-x": [["2026-01-31T12:00:01Z step 1"]], "smoke-1-y": [["2026-01-31T12:05:01Z resumed"]]}
    server.pods = [first]
    shown = submitted(server, RUNNING, RUNNING, pods_are(second, first), SUCCEEDED)
    assert follow(shown) == 0
    assert shown[1:-1] == ["step 1", "the log from its beginning, from another pod:", "resumed"]


def test_the_log_of_a_job_that_has_ended(server: Server) -> None:
    server.logs = {"smoke-1-x": [["2026-01-31T12:00:01Z step 1"]]}
    server.pods = [pod("smoke-1-x", "2026-01-31T12:00:00Z", {"terminated": {}})]
    shown = submitted(server, SUCCEEDED)
    assert follow(shown) == 0
    assert shown == ["step 1", "smoke-1: ended; job SUCCEEDED"]


@pytest.mark.parametrize(
    ("state", "code", "last"),
    [
        (job_is("Failed", "FAILED", failed=4, message="exit 1"), 1, "failed; job FAILED; failed 4 times; exit 1"),
        (job_is("Failed", message="no head"), 1, "failed; no head"),
        (job_is("Failed", "FAILED", message=f"{ENDED} 143, logs"), 143, f"failed; job FAILED; {ENDED} 143, logs"),
        (
            job_is("Failed", "FAILED", message=f"{ENDED} 1, {ENDED} 143"),
            1,
            f"failed; job FAILED; {ENDED} 1, {ENDED} 143",
        ),
        (job_is("Complete", "STOPPED"), 143, "ended; job STOPPED"),
        (job_is("Suspended"), 143, "stopped; it can be let go again"),
    ],
)
def test_the_exit_code_is_that_of_the_job(server: Server, state: Step, code: int, last: str) -> None:
    shown = submitted(server, state)
    assert follow(shown) == code
    assert shown == [f"smoke-1: {last}"]


def test_a_job_that_waits_in_a_queue_is_waited_for(server: Server) -> None:
    words = ("cluster.kubernetes.scheduler=kueue", "cluster.kubernetes.queue=team-a")
    shown = submitted(server, job_is("Suspended"), SUCCEEDED, words=words)
    assert follow(shown) == 0
    assert shown == ["smoke-1: waits in its queue", "smoke-1: ended; job SUCCEEDED"]


def test_the_log_of_a_sidecar_is_in_the_head(server: Server) -> None:
    words = ("cluster.kubernetes.scheduler=kai", "cluster.kubernetes.queue=team-a")
    shown = submitted(server, RUNNING, SUCCEEDED, words=words)
    labels = {"ray.io/cluster": "smoke-1-abcde", "ray.io/node-type": "head"}
    server.pods = [pod("head", "2026-01-31T12:00:00Z", {"running": {}}, **labels)]
    server.logs = {"head": [["2026-01-31T12:00:01Z step 1"]]}
    assert follow(shown) == 0
    assert shown[1] == "step 1"


def test_ctrl_c_leaves_the_job_running(server: Server) -> None:
    submitted(server, RUNNING)
    shown: list[str] = []

    def interrupted(text: str) -> None:
        shown.append(text)
        if len(shown) == 1:
            raise KeyboardInterrupt

    assert Kubernetes(None, interrupted).follow(NAME) == 0
    assert shown[1] == f"\nno longer following; smoke-1 goes on\n{HINTS}"
    assert server.rayjobs[NAME]["spec"].get("suspend") is None


def test_a_job_that_is_not_there(server: Server) -> None:
    for act in (Kubernetes(None).follow, Kubernetes(None).stop):
        with pytest.raises(ConfigError, match="there is no RayJob smoke-1 in namespace research; kubectl get rayjobs"):
            act(NAME)


def test_a_stopped_job_is_suspended_and_can_go_on(server: Server) -> None:
    submitted(server, RUNNING)
    said = Kubernetes(None).stop(NAME)
    assert server.rayjobs[NAME]["spec"]["suspend"] is True
    assert said == (
        "smoke-1 stops: its driver finishes the step in hand and saves, then its pods end. To go on with it: kubectl "
        'patch rayjob smoke-1 --type merge -p \'{"spec": {"suspend": false}}\'; or submit the same words with the same '
        "run.dir"
    )


def test_of_a_queued_job_the_workload_is_deactivated(server: Server) -> None:
    """Kueue would let a suspended RayJob go again."""
    submitted(server, RUNNING, words=("cluster.kubernetes.scheduler=kueue", "cluster.kubernetes.queue=team-a"))
    server.workloads = {"rayjob-smoke-1-4f": {}}
    said = Kubernetes(None).stop(NAME)
    assert server.workloads == {"rayjob-smoke-1-4f": {"spec": {"active": False}}}
    assert 'kubectl patch workload rayjob-smoke-1-4f --type merge -p \'{"spec": {"active": true}}\'' in said


def test_a_queued_job_that_was_stopped_is_followed_to_its_end(server: Server) -> None:
    words = ("cluster.kubernetes.scheduler=kueue", "cluster.kubernetes.queue=team-a")
    shown = submitted(server, RUNNING, job_is("Suspended"), words=words)
    server.workloads = {"rayjob-smoke-1-4f": {}}
    Kubernetes(None).stop(NAME)
    assert follow(shown) == 143
    assert shown[-1] == "smoke-1: stopped; it can be let go again"
    assert Kubernetes(None).stop(NAME) == "smoke-1 has ended already: stopped; it can be let go again"


def test_who_may_not_look_at_workloads_sees_a_job_wait(server: Server) -> None:
    words = ("cluster.kubernetes.scheduler=kueue", "cluster.kubernetes.queue=team-a")
    server.refuse = {("GET", "/workloads"): (403, "forbidden")}
    shown = submitted(server, job_is("Suspended"), SUCCEEDED, words=words)
    assert (follow(shown), shown[0]) == (0, "smoke-1: waits in its queue")


def test_a_job_that_has_ended_is_not_stopped(server: Server) -> None:
    submitted(server, SUCCEEDED)
    assert Kubernetes(None).stop(NAME) == "smoke-1 has ended already: ended; job SUCCEEDED"
    assert not any(method == "PATCH" for method, _, _ in server.asked)


def test_an_api_server_out_of_reach(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.port = 1  # nobody listens there
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    shown: list[str] = []
    assert follow(shown) == 75
    assert shown[0].startswith("the API server cannot be reached: ")
    assert shown[0].endswith(f"; smoke-1 may well go on\n{HINTS}")
    with pytest.raises(RunError, match="^the API server cannot be reached: "):
        Kubernetes(None).apply(rayjob())


@pytest.mark.parametrize("path", ["/pods", "/rayjobs", f"/rayjobs/{NAME}"])
@pytest.mark.parametrize("status", [401, 403, 500])
def test_who_is_not_let_in_any_more_is_told_that_the_job_may_go_on(server: Server, path: str, status: int) -> None:
    shown = submitted(server, RUNNING)
    server.refuse = {("GET", path): (status, "because")}
    assert follow(shown) == 75
    assert (
        shown[-1] == f"smoke-1 cannot be followed, and may well go on; the API server said {status}: because\n{HINTS}"
    )


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError) as refused:
        Kubernetes(None)
    assert str(refused.value) == (
        "cluster=kuberay needs the package kubernetes; pip install rlflow[kubernetes], or hand kubectl what --dry-run "
        "prints"
    )


def test_without_a_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(
        ConfigError, match="does not say how to reach a cluster: .*set KUBECONFIG, or try kubectl get pods"
    ):
        Kubernetes(None)


def test_a_position_in_a_log() -> None:
    position = Position()
    assert position.query() == {}
    lines = ["2026-01-31T12:00:00.5Z a", "2026-01-31T12:00:00.123456789Z the clock went back", "2026-01-31T12:00:01Z b"]
    assert [position.advance(line) for line in lines] == ["a", "the clock went back", "b"]
    assert position.query() == {"sinceTime": "2026-01-31T12:00:01Z"}
    again = ["2026-01-31T12:00:01Z b", "2026-01-31T12:00:01.1Z c", "unable to read"]
    assert [position.advance(line) for line in again] == [None, "c", "unable to read"]


def test_what_pods_wait_for() -> None:
    pull = {"waiting": {"reason": "ImagePullBackOff", "message": "not found: rlflow:cuda"}}
    pods = [
        {"status": {"containerStatuses": [{"name": "ray-worker", "state": pull}]}},
        {"status": {"containerStatuses": [{"name": "ray-head", "state": pull}]}},
        {"status": {"initContainerStatuses": [{"name": "w", "state": {"waiting": {"reason": "PodInitializing"}}}]}},
        {"status": {"conditions": [{"type": "PodScheduled", "status": "True"}]}},
        {"status": {}},
    ]
    assert waiting_for(pods) == "2 pods wait: ImagePullBackOff not found: rlflow:cuda"


def test_a_job_without_a_status_is_new() -> None:
    state = state_of({"metadata": {}, "spec": {}})
    assert (state.deployment, state.exit_code) == ("", None)
    assert newest_with_log([]) is None
