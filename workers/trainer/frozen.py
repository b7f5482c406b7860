"""A frozen policy, such as the reference: whole in one process, or sharded over the ranks of a group in `model.dtype`.

Every call of a group is collective. Each rank brings samples of its own, and ranks with fewer rows than another compute
empty ones, because a layer is gathered by all ranks together.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rlflow.batching.pack import pack
from rlflow.batching.plan import packed_runs, runs_of
from rlflow.config import Config
from rlflow.types import FloatArray, Likely, Sample, Support, TrainSample
from rlflow.weights.shape.layout import chunk_of
from rlflow.workers.trainer.gate import settle_way
from rlflow.workers.trainer.layers import decoder_layers
from rlflow.workers.trainer.policy import Policy, empty_policy, load_policy, split_logprobs, torch_dtype
from rlflow.workers.trainer.pretrained import with_memory
from rlflow.workers.trainer.process_group import choose_device, join
from rlflow.workers.trainer.way import Way, way_of


class FrozenPolicy:
    """One rank of a policy that never changes."""

    def __init__(
        self, config: Config, model_path: str, rank: int = 0, num_ranks: int = 1, rendezvous: str = ""
    ) -> None:
        """With several ranks, meet the others at `rendezvous` (see `process_group.join`).

        Raises ConfigError for a model that cannot be trained.
        """
        self._device = choose_device(rank)
        self._num_ranks = num_ranks
        self._max_tokens = config.trainer.micro_batch_tokens
        if num_ranks > 1:
            join(rendezvous, rank, num_ranks, self._device, config.deadlines.train_s)
            self._policy = _sharded(config, model_path, rank, num_ranks, self._device)
        else:
            self._policy = load_policy(config, model_path, self._device, torch_dtype(config))
        self._policy.requires_grad_(False).eval()
        forward = partial(self._policy, has_plain=True)
        self.agreement = settle_way(
            self._policy.model,
            forward,
            self._most,
            torch_dtype(config),
            config.model.max_length,
            images=self._policy.images,
        )

    @torch.no_grad()
    def logprobs(self, groups: Sequence[Sequence[TrainSample]]) -> list[FloatArray]:
        """[L] for each sample of this rank, groups laid end to end; 0 where there is no loss."""
        rows = self._rows([sample for group in groups for sample in group])
        found: list[FloatArray] = []
        for samples in rows + [[]] * (int(self._most(len(rows))) - len(rows)):
            logprobs, _ = self._policy(pack([samples]))
            found.extend(split_logprobs(logprobs, samples))
        return found

    @torch.no_grad()
    def likeliest(self, groups: Sequence[Sequence[TrainSample]], k: int, num_ids: int) -> list[Likely]:
        """The `k` likeliest of the first `num_ids` tokens in the place of each loss token, for each sample."""
        rows = self._rows([sample for group in groups for sample in group])
        found: list[Likely] = []
        for samples in rows + [[]] * (int(self._most(len(rows))) - len(rows)):
            ids, logprobs = (each.cpu().numpy() for each in self._policy(pack([samples]), likeliest_of=(k, num_ids)))
            ends = np.cumsum([int(one.sample.loss_mask.sum()) for one in samples])
            cut = zip(samples, *(np.split(each, ends)[:-1] for each in (ids, logprobs)), strict=True)
            found += [likely_of(one.sample, of_one, said) for one, of_one, said in cut]
        return found

    def _most(self, number: float) -> float:
        """The largest number that a rank has."""
        if self._num_ranks == 1:
            return number
        most = torch.tensor(number, device=self._device, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)

    def _rows(self, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        """Runs of at most `trainer.micro_batch_tokens` tokens as they go through the model, or of one sample."""
        if (way := way_of(self._policy.model)) is Way.packed:
            return packed_runs(samples, self._max_tokens)
        return runs_of(samples, self._max_tokens, padded=way is Way.padded)


def likely_of(sample: Sample, ids: NDArray[np.integer], logprobs: FloatArray) -> Likely:
    """From what is likely in the places of a sample's loss tokens, [N, k] each."""
    counts = np.where(sample.loss_mask, ids.shape[1], 0).astype(np.int32)
    return Likely(Support(ids=ids.reshape(-1).astype(np.int32), counts=counts), logprobs.reshape(-1))


def _sharded(config: Config, model_path: str, rank: int, num_ranks: int, device: torch.device) -> Policy:
    """The policy with this rank's rows of every parameter, which the ranks gather layer by layer to compute."""
    policy, values = empty_policy(config, model_path)
    for parameter in policy.parameters():
        parameter.data = parameter.detach().to(torch_dtype(config))
    mesh = init_device_mesh(device.type, (num_ranks,))
    for module in (*decoder_layers(policy.model), policy):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    shapes = {name: parameter.shape for name, parameter in policy.model.named_parameters()}
    for _ in with_memory(policy, device):
        pass
    policy.to(device)  # shows FSDP its new parameters, which it pads, and moves buffers
    for name, parameter in policy.model.named_parameters():
        assert isinstance(parameter, DTensor), "fully_shard makes every parameter one"
        rows = values.rows(name, *chunk_of(shapes[name][0], rank, num_ranks))
        parameter.to_local().detach().copy_(rows)
    return policy
