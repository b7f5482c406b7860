"""The settings that are one of a few words."""

from enum import StrEnum


class OnExists(StrEnum):
    resume = "resume"
    """Go on from its newest checkpoint."""
    fail = "fail"
    """Refuse to start."""
    fresh = "fresh"
    """Move it aside and begin anew."""


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Aggregation(StrEnum):
    """How a step averages over tokens and sequences."""

    token_mean = "token_mean"
    """Every token weighs the same (DAPO, arXiv:2503.14476)."""
    seq_mean_token_mean = "seq_mean_token_mean"
    """Every sequence weighs the same (GRPO, arXiv:2402.03300; GSPO, GMPO)."""
    seq_mean_token_sum = "seq_mean_token_sum"
    """The sum over a sequence, averaged over sequences."""
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"
    """The same divided by rollout.max_new_tokens, a constant (Dr. GRPO, arXiv:2503.20783)."""
    token_sum = "token_sum"
    """The sum over all tokens of an update, divided by nothing: more tokens are a larger gradient."""


class Proximal(StrEnum):
    behaviour = "behaviour"
    interpolated = "interpolated"
    recomputed = "recomputed"


class Order(StrEnum):
    oldest_first = "oldest_first"
    ready_first = "ready_first"


class Late(StrEnum):
    requeue = "requeue"
    mask = "mask"
    train = "train"


class Update(StrEnum):
    rolling = "rolling"
    all = "all"


class Speculative(StrEnum):
    off = "off"
    ngram = "ngram"
    suffix = "suffix"


class Quantization(StrEnum):
    fp8 = "fp8"


class Placement(StrEnum):
    colocated = "colocated"
    separate = "separate"


class ProcessKind(StrEnum):
    """The first six compute, on GPUs if there are any, and take them in this order."""

    engine = "engine"
    trainer = "trainer"
    critic = "critic"
    reference = "reference"
    teacher = "teacher"
    reward_model = "reward_model"
    runner = "runner"
    reward = "reward"


class Scheduler(StrEnum):
    """What admits a job to a Kubernetes cluster, and starts all of its pods or none."""

    default = "default"
    kueue = "kueue"
    volcano = "volcano"
    kai = "kai"


class ModelPlacement(StrEnum):
    separate = "separate"
    shared = "shared"


class Backend(StrEnum):
    fsdp = "fsdp"
    deepspeed = "deepspeed"


class Offload(StrEnum):
    none = "none"
    cpu = "cpu"


class Optimizer(StrEnum):
    adamw = "adamw"
    adamw8bit = "adamw8bit"
    muon = "muon"


class Checkpointing(StrEnum):
    """What the backward pass finds of a decoder layer, beside its input."""

    none = "none"
    """Everything."""
    selective = "selective"
    """Attention and small products; the rest is computed again."""
    full = "full"
    """Nothing; the layer is computed again."""


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Send(StrEnum):
    merged = "merged"
    adapters = "adapters"


class Transport(StrEnum):
    shm = "shm"
    p2p = "p2p"
    ipc = "ipc"
    disk = "disk"


class Verify(StrEnum):
    off = "off"
    sample = "sample"
    full = "full"
