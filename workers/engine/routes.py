"""Which experts vLLM chose for each token, so that the trainer computes the token with the same (`trainer/routing.py`).

vLLM keeps the choices beside its cache, by block, and gives them at the end of a request: those of the prompt from a
token on, and those of the reply (0.32, `distributed/aux_output_connector`). It does so on GPUs only.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.config import Config, Speculative
from rlflow.errors import ConfigError, RunError
from rlflow.models.opening import open_config
from rlflow.settings.engine_args import known_arguments
from rlflow.types import ExpertArray

_OFF = "set rollout.replay_experts=false, and the trainer chooses experts for itself"


def num_replayed(config: Config, model_path: str, on_gpu: bool) -> int:
    """The experts of a layer if vLLM is to say which it chose; 0 if not, or if the model is no mixture of experts.

    Raises ConfigError if it is to and cannot.
    """
    if not on_gpu or not config.rollout.replay_experts or not config.trainer.ranks:
        return 0
    from rlflow.workers.trainer.layers import num_experts

    number = num_experts(open_config(model_path, trust=config.model.trust_remote_code))
    if number and config.rollout.speculative is Speculative.suffix:
        raise ConfigError(
            f"rollout.speculative=suffix takes a part of vLLM that does not say which experts it chose; {_OFF}"
        )
    if number and "aux_output_config" not in (known_arguments() or ()):
        raise ConfigError(f"this vLLM does not say which experts it chose for a prompt; install vLLM 0.32, or {_OFF}")
    return number


def routes_of(experts: NDArray[Any] | None, num_experts: int, num_tokens: int) -> ExpertArray:
    """[num_tokens, layers, k], from the choices that vLLM gave at the end of a request.

    Raises RunError if vLLM has not recorded them, because a kernel that chooses by itself passes the recorder by.
    """
    assert experts is not None, "vLLM must say which experts it chose"
    assert len(experts) == num_tokens, f"vLLM gave the experts of {len(experts)} tokens instead of {num_tokens}"
    if num_tokens and not experts.any():
        raise RunError(
            "vLLM says that every token went to expert 0, so its kernel for experts records no choice; set "
            f"rollout.engine_args.moe_backend=triton, or {_OFF}"
        )
    return experts.astype(np.uint8 if num_experts < 256 else np.uint16, copy=False)
