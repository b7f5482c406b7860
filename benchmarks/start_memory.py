"""Host memory that a rank of the trainer takes while it starts: the whole model in float32 first, or its own rows.

    python benchmarks/start_memory.py [--ranks 1,2,4]

SmolLM2-135M, written in bfloat16 as models are published. `whole` loads it as transformers does, in float32, before
anything is sharded; `rows` starts the FSDP2 back end. Anonymous memory is sampled every 2 ms; the page cache does not
count, because ranks share it.
"""

import argparse
import tempfile
import threading
from pathlib import Path

import torch
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlflow.config import Config, Dtype
from rlflow.models.resolve import resolve_model
from rlflow.workers.trainer.fsdp import FsdpTrainer

PERIOD_S = 0.002


def anonymous_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def measure(rank: int, num_ranks: int, way: str, model: str, folder: str) -> None:
    """Writes the peak above what the process had before, in MiB."""
    torch.set_num_threads(1)
    config = Config()
    config.trainer.ranks, config.model.dtype, config.deadlines.train_s = num_ranks, Dtype.bfloat16, 300.0
    before, peak, ended = anonymous_mib(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(PERIOD_S):
            peak = max(peak, anonymous_mib())

    watching = threading.Thread(target=watch)
    watching.start()
    if way == "whole":
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    else:
        loaded = FsdpTrainer(config, model, rank, num_ranks, f"file://{folder}/rendezvous")
    ended.set()
    watching.join()
    Path(folder, str(rank)).write_text(str(max(peak, anonymous_mib()) - before))
    if isinstance(loaded, FsdpTrainer):
        loaded.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4")
    counts = [int(each) for each in parser.parse_args().ranks.split(",")]
    with tempfile.TemporaryDirectory() as model:
        source = resolve_model("smollm2-135m")
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(model)
        AutoTokenizer.from_pretrained(source).save_pretrained(model)
        for num_ranks in counts:
            for way in ("whole", "rows"):
                with tempfile.TemporaryDirectory() as folder:
                    spawn(measure, (num_ranks, way, model, folder), nprocs=num_ranks)
                    peaks = [float(Path(folder, str(rank)).read_text()) for rank in range(num_ranks)]
                shown = ", ".join(f"{peak:.0f}" for peak in peaks)
                print(f"{num_ranks} ranks, {way:5}: {shown} MiB; {sum(peaks):.0f} in all", flush=True)


if __name__ == "__main__":
    main()
