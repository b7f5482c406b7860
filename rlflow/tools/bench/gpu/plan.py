"""What all stages of the kit share: the device, the model, and where a stage says what it has measured.

    machine, model -> Plan (plan.json) -> each stage, in a process of its own -> Report (STAGE.json)

The trainer's stages run where neither Ray nor vLLM nor Hydra is installed, so nothing here imports them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlflow.config import Checkpointing, Config, Dtype

Figure = float | str
RANDOM = "random-"
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "tie_word_embeddings": True},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "tie_word_embeddings": False},
}  # fmt: skip
"""Sizes of Qwen2.5 (its config.json on the hub), filled with random weights: throughput, memory and transfer do not
depend on what the weights are."""
DEFAULT_ON_GPU = f"{RANDOM}1.5b"
"""Its parameters, gradients and moments take 25 GB in float32, so that it fits one GPU of 40 GB."""
DEFAULT_ON_CPU = "tiny"


class Skipped(Exception):
    """Why a stage has nothing to measure here."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Plan:
    """What the stages are told."""

    folder: str
    """Where stages leave logs, figures and the model."""
    on_gpu: bool
    num_gpus: int
    model: str
    """As `model.path`, or "random-" and one of SHAPES."""
    model_path: str = ""
    """Its folder, when it has been found or written."""

    @property
    def is_random(self) -> bool:
        return self.model.startswith(RANDOM) or self.model == "tiny"

    def write(self) -> None:
        (Path(self.folder) / "plan.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> "Plan":
        return Plan(**json.loads((folder / "plan.json").read_text()))

    def config(self) -> Config:
        """Settings of a trainer or an engine: bfloat16 and long rows on a GPU, small ones on a CPU."""
        config = Config()
        config.model.path = self.model_path
        config.model.dtype = Dtype.bfloat16 if self.on_gpu else Dtype.float32
        config.model.max_length = 4096 if self.on_gpu else 256
        config.trainer.micro_batch_tokens = 16384 if self.on_gpu else 512
        config.trainer.gradient_checkpointing = Checkpointing.full if self.on_gpu else Checkpointing.none
        config.rollout.max_running = 256 if self.on_gpu else 16
        config.rollout.kv_cache_gb = 8 if self.on_gpu else 0.1
        config.rollout.seeded = False
        return config


@dataclass(kw_only=True, slots=True)
class Report:
    """What a stage has measured so far. Every word is written at once, so that a stage that is killed loses none."""

    path: Path
    figures: dict[str, Figure] = field(default_factory=dict)
    skipped: str = ""
    failed: str = ""

    def tell(self, figures: Mapping[str, Figure]) -> None:
        self.figures.update(figures)
        self.write()

    def write(self) -> None:
        content = {"figures": self.figures, "skipped": self.skipped, "failed": self.failed}
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps(content))
        draft.replace(self.path)

    @staticmethod
    def read(path: Path) -> "Report":
        """Empty if the stage has written nothing."""
        return Report(path=path, **(json.loads(path.read_text()) if path.is_file() else {}))


def file_name(stage: str) -> str:
    """trainer/packed -> trainer-packed"""
    return stage.replace("/", "-")
