"""Whether tokenizer, model and engines agree on ids, before anything is started. Reads no weights."""

import json
from collections.abc import Iterator
from pathlib import Path

from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.models.opening import open_config, open_tokenizer
from rlflow.rollout.render import Renderer
from rlflow.workers.engine.setup import stop_token_ids

_PLACEHOLDERS = ("image_token", "audio_token", "video_token")
"""Tokens that text models without a row for them (Gemma 3 1B) have from siblings that see or hear."""


def check_tokens(config: Config, folder: str) -> None:
    """Raise ConfigError for an id without a row in the model's embedding, for a chat template that is missing or does
    not read `rollout.template_args`, and for one that ends replies where no engine stops."""
    trust = config.model.trust_remote_code
    tokenizer = open_tokenizer(folder, trust=trust)
    rows = open_config(folder, trust=trust).get_text_config().vocab_size
    absent = {tokenizer.special_tokens_map.get(name) for name in _PLACEHOLDERS}
    known = {token: id_ for token, id_ in tokenizer.get_vocab().items() if token not in absent}
    token = max(known, key=known.__getitem__)
    if known[token] >= rows:
        raise ConfigError(
            f"model.path: the tokenizer in {folder} gives ids up to {known[token]} ({token!r}), and the model's "
            f"embedding has {rows} rows (vocab_size); take the tokenizer that came with the model, or save the model "
            "after resize_token_embeddings"
        )
    for file, name, id_ in _named_ids(Path(folder)):
        if id_ >= rows:
            raise ConfigError(
                f"model.path: {name} is {id_} in {file}, and the model's embedding has {rows} rows (vocab_size); give "
                "the id that the tokenizer has for it"
            )
    ends, stops = Renderer(tokenizer, config.rollout.template_args).ends(), stop_token_ids(folder)
    if ends and not set(ends) & set(stops) and not config.rollout.stop:
        raise ConfigError(
            f"model.path: the chat template ends a reply with {tokenizer.decode(ends[:1])} ({ends[0]}), and engines "
            f"stop at {', '.join(map(str, stops)) or 'none'} (eos_token_id), so that no reply would end; add {ends[0]} "
            f"to eos_token_id in generation_config.json of {folder}, or give rollout.stop"
        )


def _named_ids(folder: Path) -> Iterator[tuple[Path, str, int]]:
    """File, name and id of each special token that the model's files name."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        named = json.loads(path.read_text()) if path.is_file() else {}
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            found = named.get(name)
            for id_ in found if isinstance(found, list) else [] if found is None else [found]:
                yield path, name, id_
