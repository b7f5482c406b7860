"""What follows from several settings together: pure questions to a Config, asked on every floor."""

from dataclasses import dataclass, replace

from rlflow.config import Config, ModelPlacement, Placement, Send, TrainerConfig, Transport


@dataclass(kw_only=True, slots=True, frozen=True)
class TransportChoice:
    transport: Transport
    reason: str


def num_shares(trainer: TrainerConfig) -> int:
    """The number of shares of a batch; the ranks of a tensor group, which are neighbours, have the same one."""
    return trainer.ranks // trainer.tensor_parallel


def num_shards(trainer: TrainerConfig) -> int:
    """The number of neighbouring ranks that hold the model once; the other replicas hold the same."""
    return trainer.ranks // trainer.replicas


def least_streamed_tokens(trainer: TrainerConfig) -> int:
    """Tokens of ready groups for which a pass through the model pays, before the step is full.

    Every pass gathers and scatters each layer, however few tokens a rank has. With one or two shares that costs little,
    and a group is trained at once; with many it tends to half a micro-batch for each.
    """
    return max(0, num_shares(trainer) - 2) * trainer.micro_batch_tokens // 2


def policy_is_reference(config: Config) -> bool:
    """True when the KL reference is the policy with its adapters disabled, so that no process holds a reference."""
    return config.algorithm.kl_coefficient > 0 and config.lora.rank is not None


def needs_reference(config: Config) -> bool:
    """True when processes of their own hold the KL reference."""
    return config.algorithm.kl_coefficient > 0 and not policy_is_reference(config)


def reference_ranks(config: Config) -> int:
    """Processes that hold the KL reference together; 0 without one."""
    if not needs_reference(config):
        return 0
    is_shared = config.cluster.roles is ModelPlacement.shared
    return config.trainer.ranks if is_shared else config.cluster.reference_ranks


def sends_adapters(config: Config) -> bool:
    """True when the engines are sent adapters alone."""
    return config.lora.rank is not None and config.lora.send is Send.adapters


def transport_of(config: Config) -> Transport:
    """The transport in use: `weights.transport`, or shm when it is null. (Placement may already have replaced null.)"""
    return config.weights.transport or Transport.shm


def transports_for(config: Config, *, on_gpus: bool) -> tuple[TransportChoice, ...]:
    """What weights.transport may become if it is null, the best one first; which of them fit depends on the machines.

    Example: four engines on the GPUs of four ranks -> ipc; shm, in case the GPUs are on two machines.
    """
    through_memory = TransportChoice(transport=Transport.shm, reason="the memory of one machine reaches all engines")
    between_ranks = TransportChoice(transport=Transport.p2p, reason="trainer and engines are on several machines")
    if sends_adapters(config):
        return (through_memory,)
    if config.lora.rank is not None:
        merged = "no rank has a part of merged adapters, which p2p and ipc would send"
        return (replace(through_memory, reason=merged),)
    is_colocated = config.cluster.placement is Placement.colocated
    if not on_gpus:
        return (through_memory,) if is_colocated else (through_memory, between_ranks)
    if not is_colocated:
        return (replace(between_ranks, reason="GPUs send each other weights faster than through the CPU's memory"),)
    shared = TransportChoice(transport=Transport.ipc, reason="engines can read the memory of the trainer's GPUs")
    scattered = "the GPUs are on several machines, and ipc reaches one; NCCL takes one process for each GPU"
    return (shared, replace(through_memory, reason=scattered))


def samples_while_loading(config: Config) -> bool:
    """True when some engines have requests under way while others take new weights."""
    return config.staleness.max_versions > 0 and config.cluster.placement is Placement.separate


def keeps_cache(config: Config) -> bool:
    """True when requests under way keep their key-value cache while an engine takes new weights."""
    return samples_while_loading(config) and not config.rollout.drain and config.rollout.keep_cache is not False


def object_store_bytes(config: Config) -> int:
    """Size of the object store of a Ray that is started here: room for groups that wait, and for those under way."""
    return int(max(256, min(config.staleness.max_ready_mb * 1.5, 4096))) << 20
