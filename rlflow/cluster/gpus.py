"""Which processes a run has, and which GPUs they are on. A dry run can ask too, because no Ray is imported."""

from dataclasses import dataclass

from rlflow.algorithms.registry import needs_critic
from rlflow.config import Config, ModelPlacement, Placement, ProcessKind, Speculative, Transport
from rlflow.errors import ConfigError
from rlflow.rewards.models import model_paths
from rlflow.runtime.derived import held_teachers, reference_ranks, teacher_ranks, transport_of


@dataclass(kw_only=True, slots=True, frozen=True)
class GpuPlan:
    counts: dict[ProcessKind, int]
    """Processes of each kind; a kind that the run does not have is left out."""
    sharing: tuple[ProcessKind, ...]
    """The kinds on the trainer's GPUs, process i on that of rank i, of rank i - n if the trainer has n; the trainer is
    one of them."""
    per_engine: int
    """GPUs of one engine."""

    @property
    def own(self) -> dict[ProcessKind, int]:
        """GPUs of each kind that shares none, and the trainer's."""
        return {
            kind: count * (self.per_engine if kind is ProcessKind.engine else 1)
            for kind, count in self.counts.items()
            if kind is ProcessKind.trainer or kind not in self.sharing
        }

    def on_a_gpu(self, kind: ProcessKind) -> int:
        """Processes of a kind on the same GPU, at most: several if each of several teachers has a rank there."""
        return -(-self.counts[kind] // self.counts[ProcessKind.trainer]) if kind in self.sharing else 1

    @property
    def total(self) -> int:
        return sum(self.own.values())


def gpu_plan(config: Config) -> GpuPlan:
    counts = {
        ProcessKind.engine: config.rollout.engines,
        ProcessKind.trainer: config.trainer.ranks,
        ProcessKind.critic: config.trainer.ranks if needs_critic(config.algorithm) else 0,
        ProcessKind.reference: reference_ranks(config),
        ProcessKind.teacher: len(held_teachers(config)) * teacher_ranks(config),
        ProcessKind.reward_model: len(model_paths(config.reward)) * config.reward.model_replicas,
    }
    counts = {kind: count for kind, count in counts.items() if count}
    sharing = {ProcessKind.trainer}
    if config.cluster.placement is Placement.colocated:
        sharing.add(ProcessKind.engine)
    if config.cluster.roles is ModelPlacement.shared:
        sharing |= counts.keys() - {ProcessKind.engine}
    return GpuPlan(
        counts=counts,
        sharing=tuple(kind for kind in counts if kind in sharing),
        per_engine=config.rollout.tensor_parallel,
    )


def check_gpus(config: Config, found: int) -> None:
    """Raise ConfigError when engines and ranks cannot share the GPUs, or when the transport does not work on them.
    Whether the GPUs are enough is checked by `placement.fit`."""
    transport, is_colocated = transport_of(config), config.cluster.placement is Placement.colocated
    if not found:
        if transport is Transport.ipc:
            raise ConfigError("weights.transport=ipc needs GPUs, and the cluster has none; set weights.transport=shm")
        if config.rollout.speculative is not Speculative.off:
            raise ConfigError(
                f"rollout.speculative={config.rollout.speculative} needs GPUs: on a CPU vLLM reports wrong "
                "log-probabilities for tokens that were guessed; set it to off"
            )
        if config.rollout.quantization is not None:
            raise ConfigError("rollout.quantization=fp8 needs GPUs, and the cluster has none; set it to null")
        if config.rollout.top_k is not None:
            raise ConfigError(
                f"rollout.top_k={config.rollout.top_k} needs GPUs: on a CPU vLLM does not report what each token was "
                "chosen among, and the trainer must know; set it to null"
            )
        return
    if transport is Transport.p2p and is_colocated:
        raise ConfigError(
            "weights.transport=p2p cannot send between two processes on one GPU, as with cluster.placement=colocated; "
            "set weights.transport=ipc"
        )
    if transport is Transport.disk and is_colocated:
        raise ConfigError(
            "weights.transport=disk sends what has changed, but an engine that sleeps for the trainer, as with "
            "cluster.placement=colocated, keeps nothing of the version before; set weights.transport=ipc or shm"
        )
    per_engine, engines, ranks = config.rollout.tensor_parallel, config.rollout.engines, config.trainer.ranks
    if is_colocated and (per_engine != 1 or engines != ranks):
        raise ConfigError(
            "cluster.placement=colocated gives each GPU one engine and one rank of the trainer, so that it needs "
            f"rollout.tensor_parallel=1 and rollout.engines equal to trainer.ranks; got {per_engine}, {engines} "
            f"and {ranks}; change them, or take cluster.placement=separate"
        )
