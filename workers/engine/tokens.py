"""Whether tokenizer, model and engines agree on ids, before anything is started. Reads no weights."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from rlflow.algorithms.registry import needs_critic
from rlflow.config import Backend, Config
from rlflow.errors import ConfigError
from rlflow.models.images import FAMILIES, open_images, takes_images
from rlflow.models.opening import open_config, open_tokenizer
from rlflow.rollout.render import Renderer
from rlflow.types import Task
from rlflow.workers.engine.setup import ids_in, stop_token_ids


def check_tokens(config: Config, folder: str) -> None:
    """Raise ConfigError for an id without a row in the model's embedding, for a chat template that is missing or does
    not read `rollout.template_args`, and for one that ends replies where no engine stops."""
    trust = config.model.trust_remote_code
    _check_images(config, folder)
    tokenizer = open_tokenizer(folder, trust=trust)
    model_config = open_config(folder, trust=trust)
    rows = model_config.get_text_config().vocab_size
    # Text models without rows for these (Gemma 3 1B) have them from siblings that see or hear.
    absent = {tokenizer.special_tokens_map.get(f"{kind}_token") for kind in ("image", "audio", "video")}
    given = [(id_, repr(token)) for token, id_ in tokenizer.get_vocab().items() if token not in absent]
    largest, name = max([*given, *_named_ids(Path(folder))])
    if largest >= rows:
        raise ConfigError(
            f"model.path: {name} is token {largest} of the tokenizer in {folder}, and the model's embedding has {rows} "
            "rows (vocab_size); take the tokenizer that came with the model, or resize_token_embeddings and save both"
        )
    renderer = Renderer(tokenizer, config.rollout.template_args, has_images=takes_images(model_config))
    ends, stops = renderer.ends(), stop_token_ids(folder)
    if ends and not set(ends) & set(stops) and not config.rollout.stop:
        raise ConfigError(
            f"model.path: the chat template ends a reply with {tokenizer.decode(ends[:1])} ({ends[0]}), and engines "
            f"stop at {', '.join(map(str, stops)) or 'none'} (eos_token_id), so that no reply would end; add {ends[0]} "
            f"to eos_token_id in generation_config.json of {folder}, or give rollout.stop"
        )


def check_shown(config: Config, folder: str, tasks: Iterable[Task]) -> None:
    """Raise ConfigError if a task shows an image to a model that takes none."""
    if takes_images(open_config(folder, trust=config.model.trust_remote_code)):
        return
    talks = ((task.id, (*task.prompt, *chain(*task.demonstrations))) for task in tasks)
    shown = next((name for name, talk in talks for message in talk if "parts" in message), None)
    if shown is not None:
        raise ConfigError(
            f"task {shown} shows an image, and the model in {folder} takes none; rlflow gives images to models of the "
            f"families {', '.join(FAMILIES)}"
        )


def _check_images(config: Config, folder: str) -> None:
    """Raise ConfigError for settings that a model which takes images cannot be trained with, and for its processor."""
    if open_images(folder, trust=config.model.trust_remote_code) is None or not config.trainer.ranks:
        return
    cures = {
        "lora.rank=null": config.lora.rank is not None,
        "trainer.backend=fsdp": config.trainer.backend is not Backend.fsdp,
        "trainer.tensor_parallel=1": config.trainer.tensor_parallel > 1,
        "trainer.sequence_parallel=1": config.trainer.sequence_parallel > 1,
        "algorithm.kl_coefficient=0": config.algorithm.kl_coefficient > 0,
        "teacher.models={}": bool(config.teacher.models),
        "algorithm.advantage=grpo": needs_critic(config.algorithm),
    }
    if needed := [cure for cure, is_needed in cures.items() if is_needed]:
        raise ConfigError(
            f"the model in {folder} takes images, and its decoder is trained whole, by FSDP2, without reference, "
            f"teacher or critic; set {' and '.join(needed)}"
        )


def _named_ids(folder: Path) -> Iterator[tuple[int, str]]:
    """Each special token that the model's files name, with its name."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            yield from ((id_, f"{name} of {path.name}") for id_ in ids_in(path, name) or ())
