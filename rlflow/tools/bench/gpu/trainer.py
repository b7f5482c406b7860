"""The trainer's stages: a step packed, with copies of the prompt, and padded; state in CPU memory or on NVMe.

They need torch, transformers, NumPy, safetensors, pydantic and psutil; neither Ray nor vLLM.
"""

import json
import tempfile
import time
from pathlib import Path

from rlflow.config import Backend, Config, Offload
from rlflow.errors import RunError
from rlflow.tools.bench.gpu.plan import Plan, Report, Skipped
from rlflow.tools.bench.training_sides import Group, Workload, micro_batches_of, read_groups, run_side

ON_GPU = Workload(groups=8, group_size=8, prompt=1024, shortest=256, longest=2048)
ON_CPU = Workload(groups=1, group_size=4, prompt=64, shortest=16, longest=64)


def samples(plan: Plan) -> Path:
    """The samples of every side, TRL's too; the same in every process."""
    path = Path(plan.folder) / "samples.npz"
    vocabulary = json.loads((Path(plan.model_path) / "config.json").read_text())["vocab_size"]
    (ON_GPU if plan.on_gpu else ON_CPU).write(path, vocabulary)
    return path


def packed(plan: Plan, report: Report) -> None:
    """The trainer's own step: every prompt computed once a group."""
    _side("packed", plan, report)


def copies(plan: Plan, report: Report) -> None:
    """The same kernels, but each sample has a prompt of its own."""
    _side("unshared", plan, report)


def padded(plan: Plan, report: Report) -> None:
    """A loop over padded batches with transformers, as one writes it by hand."""
    _side("padded", plan, report)


def _side(side: str, plan: Plan, report: Report) -> None:
    report.tell(run_side(side, read_groups(samples(plan)), plan.model_path, plan.config()))


def offload_cpu(plan: Plan, report: Report) -> None:
    """`trainer.offload=cpu` of FSDP2."""
    config = plan.config()
    config.trainer.offload = Offload.cpu
    _offloaded(config, plan, report)


def offload_nvme(plan: Plan, report: Report) -> None:
    """`trainer.nvme_path` of DeepSpeed's ZeRO 3, on the disk of the kit's folder."""
    if not plan.on_gpu:
        raise Skipped("DeepSpeed's asynchronous reads need a GPU")
    config = plan.config()
    config.trainer.backend, config.trainer.zero_stage = Backend.deepspeed, 3
    config.trainer.nvme_path = str(Path(plan.folder) / "nvme")
    _offloaded(config, plan, report)


def _offloaded(config: Config, plan: Plan, report: Report) -> None:
    """Seconds of the second of two steps, and the most memory of the device. Raises RunError if a step is no update."""
    import torch

    from rlflow.workers.trainer.actor import build_backend
    from rlflow.workers.trainer.fsdp import FsdpTrainer

    groups: list[Group] = read_groups(samples(plan))
    with tempfile.TemporaryDirectory() as folder:
        # Without a GPU the settings are refused, because they have no effect there; the back end itself runs.
        build = build_backend if plan.on_gpu else FsdpTrainer
        backend = build(config, plan.model_path, 0, 1, f"file://{folder}/rendezvous")
        try:
            for _ in range(2):
                started = time.perf_counter()
                backend.accumulate(micro_batches_of(config, groups))
                outcome = backend.step()
                if not outcome.applied:
                    raise RunError(f"the step updated nothing: its gradient's norm is {outcome.grad_norm}")
                report.tell({"step_s": time.perf_counter() - started, "grad_norm": outcome.grad_norm})
            if plan.on_gpu:
                report.tell({"peak_mb": torch.cuda.max_memory_allocated() / 2**20})
        finally:
            backend.close()
