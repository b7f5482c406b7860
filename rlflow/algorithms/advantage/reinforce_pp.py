"""REINFORCE++ (arXiv:2501.03262): no group, the batch is the baseline."""

from collections.abc import Sequence

from rlflow.algorithms.advantage.base import Advantages, Group, Scope, rewards_of, whole_episodes
from rlflow.algorithms.base import Traits
from rlflow.algorithms.token_advantage.gae import Moments, whiten_value


@Traits(scope=Scope.batch, compares=False)
def reinforce_pp(groups: Sequence[Group]) -> Advantages:
    """(r - mean) / deviation over all loss tokens of the batch, where a token's return is its episode's reward.

    This is the estimator at discount 1; a penalty on the KL belongs in the loss. A group of equal rewards is not 0
    here, a batch of equal rewards is.
    """
    rewards = [rewards_of(group) for group in groups]
    lengths = [episode.num_loss_tokens for group in groups for episode in group]
    moments = Moments.of([reward for group in rewards for reward in group], lengths)
    return [whole_episodes([whiten_value(reward, moments) for reward in group]) for group in rewards]
