"""The mask of flex attention for long rows: tiles from the segments (ours), and from a whole T x T mask (torch's own).

    python benchmarks/block_lists.py [--tokens 16384 65536 131072]

Every figure is from a process of its own, on the CPU, with at most 12 GiB of memory. The row
holds groups of a prompt of 1,024 tokens and 8 completions of 1,920.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask

from rlflow.batching.pack import pack
from rlflow.types import Sample, TrainSample
from rlflow.workers.trainer.attention import block_mask_of

_PROMPT, _COMPLETION, _COMPLETIONS = 1024, 1920, 8
"""A group has 2^14 tokens."""
_LIMIT = 12 * 2**30


def measure(side: str, num_tokens: int) -> tuple[float, float]:
    """Seconds, and MiB by which the peak of the process rose."""
    resource.setrlimit(resource.RLIMIT_AS, (_LIMIT, _LIMIT))
    packed = pack([_group(index) for index in range(num_tokens // 2**14)])
    device = torch.device("cpu")
    assert len(packed.input_ids) == num_tokens
    sees = block_mask_of(packed, device).mask_mod
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if side == "segments":
        mask = block_mask_of(packed, device)
    else:
        mask = create_block_mask(sees, None, None, num_tokens, num_tokens, device="cpu")
    seconds = time.perf_counter() - start
    assert mask.sparsity() > 0
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def _group(task: int) -> list[TrainSample]:
    length = _COMPLETION + 1  # the last token predicts nothing and is left out
    return [
        TrainSample(
            sample=Sample(
                prompt_ids=np.full(_PROMPT, task, np.int32),
                completion_ids=np.full(length, 1 + index, np.int32),
                loss_mask=np.ones(length, np.bool_),
                logprobs=np.zeros(length, np.float32),
                versions=np.zeros(length, np.int32),
                cache_versions=np.zeros(length, np.int32),
            ),
            advantage=1.0,
        )
        for index in range(_COMPLETIONS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**14, 2**16, 2**17])
    parser.add_argument("--one", nargs=2, metavar=("SIDE", "TOKENS"))
    chosen = parser.parse_args()
    if chosen.one:
        print(*measure(chosen.one[0], int(chosen.one[1])))
        return
    print("| tokens | from | seconds | MiB |\n|---|---|---|---|")
    for num_tokens in chosen.tokens:
        for side in ("segments", "whole mask"):
            command = [sys.executable, __file__, "--one", side, str(num_tokens)]
            run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            figures = run.stdout.split() if run.returncode == 0 else []
            shown = f"{float(figures[0]):.2f} | {float(figures[1]):,.0f}" if figures else "| more than 12 GiB"
            print(f"| {num_tokens:,} | {side} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
