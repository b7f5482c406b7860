"""A reward model: a sequence classifier with one label, which gives a conversation one number.

Transcript -> its own chat template and tokenizer -> Conversation -> packed row -> score head at the last token
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import AutoModelForSequenceClassification
from transformers.modeling_layers import GenericForSequenceClassification

from rlflow.batching.pack import Conversation, pack_conversations, row_tokens
from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.models.opening import open_config, open_tokenizer
from rlflow.models.resolve import REWARD
from rlflow.runtime.gpus import has_gpu
from rlflow.types import EpisodeEnd, Message, Transcript, Verdict
from rlflow.workers.trainer.gate import settle_way
from rlflow.workers.trainer.policy import torch_dtype
from rlflow.workers.trainer.pretrained import load_whole
from rlflow.workers.trainer.value import ValueModel
from rlflow.workers.trainer.way import is_packed


class RewardModel:
    """A reward model that never changes, whole in one process."""

    def __init__(self, config: Config, folder: str) -> None:
        """Raises ConfigError for a model that cannot be used, or whose score is not that of its last token."""
        trust = config.model.trust_remote_code
        self._tokenizer = open_tokenizer(folder, trust=trust, setting=REWARD)
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"reward.model: the tokenizer in {folder} has no chat template, and what is scored is a conversation; "
                "put a chat_template.jinja into the folder"
            )
        text = open_config(folder, trust=trust, setting=REWARD).get_text_config()
        positions: int = text.max_position_embeddings
        self._max_tokens = positions
        self._padding = text.pad_token_id
        device = torch.device("cuda" if has_gpu() else "cpu")
        model = load_whole(AutoModelForSequenceClassification, config, folder, REWARD, device, torch_dtype(config))
        if not isinstance(model, GenericForSequenceClassification) or model.num_labels != 1:
            raise ConfigError(
                f"reward.model names a {type(model).__name__} with {model.config.num_labels} labels, whose score is "
                "not one number at the last token; take one such as LlamaForSequenceClassification with one label"
            )
        self._model = ValueModel(model).requires_grad_(False).eval()
        forward = partial(self._model, has_plain=True)
        settle_way(model, forward, lambda found: found, torch_dtype(config), positions, REWARD)

    def encode(self, transcript: Transcript) -> Conversation | Verdict:
        """The whole conversation, the policy's prompt first; a Verdict if the model cannot read it."""
        try:
            ids = self._render([*transcript.prompt, *transcript.completion], has_reply=True)
            prompt = self._render(transcript.prompt, has_reply=False)
        except TemplateError as error:
            detail = f"the reward model's chat template refused the conversation: {error}"
            return Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail=detail)
        if len(ids) > self._max_tokens:
            detail = f"the conversation has {len(ids)} tokens, and the reward model takes {self._max_tokens}"
            return Verdict(reward=None, end=EpisodeEnd.NO_VERDICT, detail=detail)
        # transformers reads the score at the last token that is not padding, and some templates end with padding.
        while len(ids) > 1 and ids[-1] == self._padding:
            ids.pop()
        differing = (index for index, (one, other) in enumerate(zip(prompt, ids, strict=False)) if one != other)
        cut = max(1, next(differing, min(len(prompt), len(ids))))
        return Conversation(prompt_ids=np.array(ids[:cut], np.int32), reply_ids=np.array(ids[cut:], np.int32))

    def num_tokens(self, conversations: Sequence[Conversation]) -> int:
        """How many tokens go through the model with these, padding included."""
        if is_packed(self._model.model):
            return row_tokens(conversations)
        return len(conversations) * max(len(each.prompt_ids) + len(each.reply_ids) for each in conversations)

    def scores(self, conversations: Sequence[Conversation]) -> list[float]:
        """The score of each, all of them at once."""
        with torch.no_grad():
            (values,) = self._model(pack_conversations(conversations))
        return values.tolist()

    def _render(self, messages: Sequence[Message], *, has_reply: bool) -> list[int]:
        conversation = [{"role": message["role"], "content": message["content"]} for message in messages]
        text = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=not has_reply)
        return self._tokenizer.encode(text, add_special_tokens=False)


def load_reward_model(config: Config, folder: str) -> RewardModel:
    """A reward model that has scored once, so no request has to wait for kernels to be compiled."""
    model = RewardModel(config, folder)
    one, two = (np.zeros(length, np.int32) for length in (1, 2))
    model.scores([Conversation(prompt_ids=one, reply_ids=two), Conversation(prompt_ids=two, reply_ids=one)])
    return model
