"""The critic: a transformers model with a value head, and its objective.

Shape letter: N loss tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlflow.algorithms.value_loss import value_loss
from rlflow.batching.pack import PackedBatch
from rlflow.config import Config
from rlflow.roles import Mean
from rlflow.workers.trainer.layers import VALUE_HEAD
from rlflow.workers.trainer.objective import Objective, Row
from rlflow.workers.trainer.plain import plain_states
from rlflow.workers.trainer.policy import hidden_states
from rlflow.workers.trainer.pretrained import FirstValues, empty_model
from rlflow.workers.trainer.rank_group import ALONE, RankGroup
from rlflow.workers.trainer.sequence_parallel import gather, own_tokens, places_in


class ValueModel(nn.Module):
    """A critic; the whole computation is inside `forward`, because FSDP's hooks on the root must see it."""

    images = None
    """It takes none."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model` has a head of one output, called as `layers.VALUE_HEAD` says."""
        super().__init__()
        self.model = model
        self._row_group = ALONE

    def share_rows(self, group: RankGroup) -> None:
        """Divide the tokens of each row among the ranks of `group`; see `sequence_parallel`."""
        self._row_group = group

    def forward(self, packed: PackedBatch, has_plain: bool = False) -> tuple[Tensor, ...]:
        """The value [N] (float32, with gradient) of the state in which each loss token was sampled.

        With `has_plain` the states [N, hidden size], as they are here and as transformers alone computes them.
        """
        hidden = hidden_states(self.model, packed, group=self._row_group)
        head, here = self.model.get_submodule(VALUE_HEAD), own_tokens(self._row_group, len(hidden))
        own = places_in(here, packed.loss_positions)
        places, positions = (torch.from_numpy(each).to(hidden.device) for each in (own, packed.loss_positions[own]))
        # An embedding gathers rows, because its backward is deterministic on the CPU.
        states = F.embedding(positions - here.start, hidden)
        found = states.float() if has_plain else head(states)[:, 0].float()
        found = gather(found, places, packed.num_loss_tokens, self._row_group)
        return (found, plain_states(self.model, packed)) if has_plain else (found,)


def empty_value_model(config: Config, model_path: str) -> tuple[ValueModel, FirstValues]:
    """The model at `model_path`, float32, with its parameters on the meta device, and the values they begin with.

    Its head gives 0 everywhere at first. Raises ConfigError for a model that cannot be trained.
    """
    model, values = empty_model(AutoModelForCausalLM, config, model_path, is_critic=True)
    return ValueModel(model), values


class ValueObjective(Objective):
    """Mean over the loss tokens of the clipped squared error; outputs are values, [N]."""

    num_sums = 8

    def __init__(self, config: Config) -> None:
        self._clip = config.critic.value_clip

    def __call__(self, outputs: tuple[Tensor, ...], packed: PackedBatch, version: int) -> Row:
        (values,) = outputs
        empty = values.new_zeros(0).cpu().numpy()
        old = torch.from_numpy(empty if packed.values is None else packed.values).to(values.device)
        returns = torch.from_numpy(empty if packed.returns is None else packed.returns).to(values.device)
        assert len(old) == len(returns) == len(values), "a critic learns from samples with targets"
        loss, is_clipped = value_loss(values, old, returns, clip=self._clip)
        columns = [is_clipped, values, returns, returns.square(), (values - returns).square()]
        sums = [column.detach().double().sum() for column in (*columns, loss)]
        counts = values.new_tensor([packed.num_sequences, len(values)], dtype=torch.float64)
        return Row(loss=loss.sum(), sums=torch.cat([torch.stack(sums), counts]), largest=counts.new_zeros(()))

    def divisor(self, sums: Tensor) -> float:
        return float(sums[-1])

    def metrics(self, sums: Tensor, largest: Tensor) -> dict[str, Mean]:
        """`critic/explained` is 1 - squared error / variance of the returns: 0 for a constant, 1 for an oracle."""
        clipped, value, returned, returned_squared, unexplained, loss, _, count = sums.tolist()
        variation = returned_squared - returned**2 / max(count, 1)
        explained = 1 - unexplained / variation if variation > 1e-9 * max(count, 1) else 0.0
        return {
            "critic/loss": Mean(total=loss, count=count),
            "critic/clip_fraction": Mean(total=clipped, count=count),
            "critic/value": Mean(total=value, count=count),
            "critic/explained": Mean(total=explained, count=1),
        }
