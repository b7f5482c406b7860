"""Configurations, tokenizers and models of a folder: the only place that asks transformers for them.

`trust` is `model.trust_remote_code`. Without it no Python code of the folder runs, and nobody is asked on the terminal.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import ConfigError, first_line
from rlflow.models.chatml import CHATML, chatml_end
from rlflow.models.resolve import POLICY
from rlflow.models.without_torchvision import leave_videos_out

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def open_config(folder: str, *, trust: bool, setting: str = POLICY) -> "PreTrainedConfig":
    """`setting` named the folder, for the ConfigError if it needs trust."""
    from transformers import AutoConfig

    return _opened(AutoConfig.from_pretrained, folder, folder, trust, setting)


def open_tokenizer(folder: str, *, trust: bool, setting: str = POLICY) -> Any:
    """The tokenizer with its chat template, as AutoTokenizer finds it; that of a policy may be given ChatML."""
    from transformers import AutoTokenizer

    tokenizer = _opened(AutoTokenizer.from_pretrained, folder, folder, trust, setting)
    if setting == POLICY and chatml_end(Path(folder)) is not None:
        tokenizer.chat_template = CHATML
    return tokenizer


def num_ids(tokenizer: Any) -> int:
    """One more than the largest id that stands for a token."""
    return max(tokenizer.get_vocab().values()) + 1


def open_processor(folder: str, *, trust: bool) -> Any:
    """What turns images into pixels and tokens. Raises ConfigError if a package of it is missing."""
    from transformers import AutoProcessor

    leave_videos_out()
    try:
        return _opened(AutoProcessor.from_pretrained, folder, folder, trust, POLICY)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"model.path: the processor in {folder}, which prepares images, cannot be opened: {first_line(error)}; "
            "install what it names, or add the files that came with the model"
        ) from error


def open_model(auto_class: Any, folder: str, *, trust: bool, setting: str = POLICY, **options: Any) -> Any:
    """A model with its weights, by one of transformers' Auto classes."""
    return _opened(auto_class.from_pretrained, folder, folder, trust, setting, **options)


def build_model(
    auto_class: Any, config: "PreTrainedConfig", *, trust: bool, setting: str = POLICY, **options: Any
) -> Any:
    """A model without weights, from what `open_config` gave."""
    return _opened(auto_class.from_config, config, str(config.name_or_path), trust, setting, **options)


def _opened(call: Callable[..., Any], source: object, folder: str, trust: bool, setting: str, **options: Any) -> Any:
    try:
        return call(source, trust_remote_code=trust, **options)
    except ValueError as error:
        if trust or "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            f"{setting}: {folder} needs Python code of its own (auto_map), and none of it is run; take a model that "
            "transformers knows, or read that code and set model.trust_remote_code=true"
        ) from error
