"""Whether ranks can share out a model's attention heads, before anything is started. Reads no weights."""

from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.models.opening import open_config


def check_heads(config: Config, folder: str) -> None:
    """Raise ConfigError if `trainer.sequence_parallel` does not divide the attention heads of the model in `folder`."""
    size = config.trainer.sequence_parallel
    if size == 1:
        return
    text = open_config(folder, trust=config.model.trust_remote_code).get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if isinstance(heads, int) and heads % size:
        fitting = [str(number) for number in range(1, heads + 1) if not heads % number]
        raise ConfigError(
            f"trainer.sequence_parallel must divide the attention heads, which ranks share out; got {size}, and "
            f"model.path names a {text.model_type} model with num_attention_heads={heads}; set it to one of "
            f"{', '.join(fitting)}"
        )
