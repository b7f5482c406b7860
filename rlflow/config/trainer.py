"""Settings of the models that are trained."""

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.choices import Backend, Checkpointing, Offload, Optimizer, Schedule, Send


@dataclass
class TrainerConfig:
    """What computes gradients and updates the weights."""

    backend: Backend = Backend.fsdp
    """What shards the model over the ranks. `deepspeed` needs the extra of that name."""
    zero_stage: int | None = None
    """Required with `deepspeed`. 1: the optimiser state is sharded; 2: the gradients too; 3: the parameters too."""
    offload: Offload = Offload.none
    """`cpu`: shards lie in CPU memory, and the optimiser runs there (ZeRO 1 and 2: the optimiser state only)."""
    nvme_path: str | None = None
    """A folder on a fast local disk to which ZeRO 3 offloads instead."""
    ranks: int = 1
    """Processes that train together, each on a GPU of its own; they share out the model and the episodes of a step.
    More give memory and speed, and the same gradient."""
    tensor_parallel: int = 1
    """Ranks that share a micro-batch, each with a slice of every decoder layer; it divides `ranks`. For activations
    that one GPU cannot hold, on GPUs of one machine; `fsdp` only."""
    sequence_parallel: int = 1
    """Ranks that share each micro-batch, each with a part of its tokens; attention exchanges heads for tokens
    (arXiv:2309.14509). For episodes so long that one GPU cannot hold their activations, which fall to a share of
    1 / `sequence_parallel`. It divides `ranks` and the model's attention heads; on GPUs of one machine."""
    replicas: int = 1
    """Copies of the model, parameters and moments, that the ranks hold together; it divides `ranks`, and `fsdp` only.
    With one for each machine, layers are gathered within a machine, and gradients cross the network once a step."""
    learning_rate: float = 1e-6
    """About 1e-6 for the whole model and 1e-5 to 1e-4 with lora.rank. Lower it when KL or entropy runs away."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to `learning_rate`."""
    schedule: Schedule = Schedule.constant
    """How it goes on after the warm-up. `linear`, `cosine`: it falls until `run.steps`."""
    schedule_args: dict[str, Any] = field(default_factory=dict)
    """`floor`: the share of `learning_rate` at which it ends (0). `effective_share`: an update's rate is multiplied by
    ratio/effective_share to this power; 0 is off, 0.5 is that of VCPO (arXiv:2602.17616)."""
    optimizer: Optimizer = Optimizer.adamw
    """`adamw8bit`: AdamW with moments of a byte each, which saves 6 of the 16 bytes a parameter; needs the extra
    `optim8bit`. `muon`: steps of equal size in all directions for the matrices of the decoder layers, AdamW for the
    rest (arXiv:2502.16982). Both with `fsdp` only."""
    weight_decay: float = 0.0
    """The share, times the learning rate, that each step takes from the matrices of the decoder layers; usually 0 in
    RL."""
    beta1: float = 0.9
    """The decay of the gradient's mean, and of Muon's momentum (0.95 is usual there)."""
    beta2: float = 0.99
    """The decay of the gradient's mean square."""
    max_grad_norm: float = 1.0
    """A gradient of a larger norm (grad_norm) is scaled down to it."""
    micro_batch_tokens: int = 4096
    """Tokens that go through the model at once on a rank, or on the ranks that share a micro-batch; this changes memory
    and speed, never the gradient."""
    streaming: bool | None = None
    """Accumulate the gradient of each group when it is ready; false waits for all groups of the step. null: true with
    GPUs. Without, trainer and engines take turns, because both are far slower when they compute on the same cores."""
    gradient_checkpointing: Checkpointing = Checkpointing.none
    """Compute decoder layers again in the backward pass instead of keeping what it needs. `full` keeps the input of
    each layer; `selective` also attention and the small products, and computes the MLP again; with `fsdp` only."""
    compile: bool | None = None
    """Compile the decoder layers. null: on a GPU, unless layers choose experts or keep a state; with `fsdp` only,
    without tensor or sequence parallelism and adapters."""
    save_optimizer: bool = True
    """Checkpoints hold the optimiser's state. false: a third of the size, and a resumed run starts its moments anew."""


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM can be started with; smaller ones fit in."""


@dataclass
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685) on linear layers of the decoder layers; the rest of the model is frozen. The
    critic has them too, and its head is trained whole."""

    rank: int | None = None
    """null trains the whole model; a rank needs the extra `lora`."""
    alpha: float = 32.0
    """What the adapters add is multiplied by alpha / rank."""
    rank_stabilised: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that a larger rank learns as fast (arXiv:2312.03732)."""
    targets: list[str] | None = None
    """The layers that have adapters, by the last parts of their names, such as [q_proj, v_proj]; null: all linear
    layers and experts of the decoder layers, but no routers. Those of experts need lora.send=merged, and a pass adds
    them up with the experts of each layer (trainer.gradient_checkpointing keeps one layer's sum)."""
    dropout: float = 0.0
    """The share of what goes into the adapters that is set to zero in passes with a gradient. Engines sample without
    it, so that the log-probability differences of a run contain it; usually 0 in RL."""
    send: Send = Send.adapters
    """What engines are sent. `merged`: the whole model, which takes longer to send but samples up to a seventh faster
    (SmolLM2-135M); also for models for which vLLM has no adapters, and for adapters on experts."""


@dataclass
class CriticConfig:
    """The value model of algorithm.advantage=gae: the policy's architecture, on the trainer's back end and ranks."""

    learning_rate: float = 1e-5
    """Larger than the policy's, because the critic must follow the policy."""
    warmup_steps: int = 0
    """Steps at the beginning that change the critic alone, so that the policy follows none that knows nothing."""
    value_clip: float | None = 0.2
    """How far a value may move in one step before its loss stops falling; null: no bound."""
