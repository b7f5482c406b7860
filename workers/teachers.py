"""Whether teachers and policy mean the same by a token, before anything is started. Reads no weights."""

import asyncio
from dataclasses import replace
from typing import Any

from rlflow.algorithms.distillation import teacher_options
from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.models.opening import open_config, open_tokenizer
from rlflow.models.resolve import TEACHERS, resolve_model
from rlflow.runtime.asking import NoAnswer
from rlflow.runtime.derived import is_served
from rlflow.workers.served import ServedModel, check_served

ANSWER_S = 30.0
"""Seconds that the server of a teacher has for each question before anything is started."""


def with_folders(config: Config) -> Config:
    """The settings with the folder of each teacher in the place of its name; URLs stay. Raises ConfigError as
    `resolve_model`."""
    folders = {
        kind: path if is_served(path) else resolve_model(path, f"{TEACHERS}.{kind}")
        for kind, path in config.teacher.models.items()
    }
    return replace(config, teacher=replace(config.teacher, models=folders))


def check_teachers(config: Config, folder: str) -> None:
    """Raise ConfigError for a teacher whose tokens are not those of the policy in `folder`.

    `config` has folders and URLs in teacher.models. A teacher may have a larger embedding, but not a smaller one.
    """
    if not config.teacher.models:
        return
    trust = config.model.trust_remote_code
    tokenizer = open_tokenizer(folder, trust=trust)
    own = tokenizer.get_vocab()
    rows = open_config(folder, trust=trust).get_text_config().vocab_size
    for kind, its_folder in config.teacher.models.items():
        setting = f"{TEACHERS}.{kind}"
        if is_served(its_folder):
            asyncio.run(_check_server(config, its_folder, setting, tokenizer, rows))
            continue
        its = open_tokenizer(its_folder, trust=trust, setting=setting).get_vocab()
        if its != own:
            token, number = min(own.items() ^ its.items(), key=lambda item: (item[1], item[0]))
            has_it, other = (folder, its_folder) if own.get(token) == number else (its_folder, folder)
            raise ConfigError(
                f"{setting}: the vocabulary of {its_folder} is not that of model.path ({folder}): token {number} is "
                f"{token!r} in {has_it}, and not in {other}; take a teacher of the policy's family"
            )
        its_rows = open_config(its_folder, trust=trust, setting=setting).get_text_config().vocab_size
        if its_rows < rows:
            raise ConfigError(
                f"{setting}: the embedding of {its_folder} has {its_rows} rows (vocab_size) and that of model.path "
                f"{rows}, so that the policy may sample tokens that the teacher does not have; resize_token_embeddings "
                f"of the teacher to {rows}, and save it"
            )


async def _check_server(config: Config, url: str, setting: str, tokenizer: Any, rows: int) -> None:
    """`check_served` of a teacher; `rows` is how many tokens the policy may sample. Raises ConfigError."""
    try:
        async with ServedModel(url, teacher_options(config.teacher)) as model:
            await check_served(model, tokenizer, rows, config.model.max_length, ANSWER_S)
    except NoAnswer as error:
        raise ConfigError(f"{setting}={url} cannot be a teacher: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{setting}={url}: {error}") from error
