"""How far a frozen bfloat16 model is from float32 at large positions, if its rotary frequencies are cast too or not.

    python benchmarks/reference_error.py [--positions 1024,4096,16384]

SmolLM2-135M reads documentation. `cast` is the whole model in bfloat16, frequencies included; `kept` is what the
reference and the reward model load; `frequencies alone` is float32 with the rounded frequencies. Means and maxima are
over the 200 tokens before each position, in nats.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from rlflow.batching.pack import pack
from rlflow.config import Config
from rlflow.models.resolve import resolve_model
from rlflow.types import Sample, TrainSample
from rlflow.workers.trainer.policy import Policy, load_policy
from rlflow.workers.trainer.pretrained import CPU, move_buffers

NUM_COMPARED = 200


def sample_of(path: str, positions: list[int]) -> Sample:
    """The text of the documentation, repeated as often as needed, with loss on the tokens before each position."""
    files = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    ids = AutoTokenizer.from_pretrained(path).encode("".join(file.read_text() for file in files))
    ids = np.resize(np.array(ids, np.int32), max(positions))
    mask = np.zeros(len(ids) - 1, np.bool_)
    for position in positions:
        mask[position - 1 - NUM_COMPARED : position - 1] = True
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Sample(
        prompt_ids=ids[:1],
        completion_ids=ids[1:],
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=versions,
        cache_versions=versions,
    )


def logprobs(policy: Policy, sample: Sample) -> Tensor:
    with torch.no_grad():
        found, _ = policy.eval()(pack([[TrainSample(sample=sample, advantage=0.0)]]))
    return found.double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", default="1024,4096,16384")
    positions = [int(each) for each in parser.parse_args().positions.split(",")]
    config, path = Config(), resolve_model("smollm2-135m")
    config.model.max_length = max(positions)
    sample = sample_of(path, positions)
    exact = load_policy(config, path)
    rounded = load_policy(config, path)
    move_buffers(rounded, lambda buffer: buffer.bfloat16().float())
    frequencies, wanted = exact.model.model.rotary_emb.inv_freq.double(), logprobs(exact, sample)
    del exact
    policies = {
        "cast": lambda: load_policy(config, path).to(torch.bfloat16),
        "kept": lambda: load_policy(config, path, CPU, torch.bfloat16),
        "frequencies alone": lambda: rounded,
    }
    for name, load in policies.items():
        policy = load()
        angle = float((policy.model.model.rotary_emb.inv_freq.double() - frequencies).abs().max())
        difference = (logprobs(policy, sample) - wanted).abs().view(len(positions), NUM_COMPARED)
        for position, row in zip(positions, difference, strict=True):
            print(
                f"{name:18} position {position:6}: angle off by {angle * position:7.3f} rad, log-probability by "
                f"{float(row.mean()):.4f} (worst {float(row.max()):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
