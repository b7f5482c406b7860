"""Payloads on disk: one safetensors file with the arrays end to end and the conversations as JSON."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from rlflow.types import EpisodePayload, Sample

_COMPLETION_FIELDS = {
    "completion_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "cache_versions": np.int32,
}


def payload_bytes(payload: EpisodePayload) -> int:
    """The size of a payload's arrays in bytes."""
    return sum(
        sample.prompt_ids.nbytes + sum(getattr(sample, name).nbytes for name in _COMPLETION_FIELDS)
        for sample in payload.samples
    )


def save_payloads(path: Path, payloads: Sequence[EpisodePayload]) -> None:
    """Write payloads to one file, which appears when it is complete."""
    samples = [sample for payload in payloads for sample in payload.samples]
    messages = json.dumps([payload.messages for payload in payloads]).encode()
    arrays: dict[str, NDArray[Any]] = {
        "samples_per_payload": np.array([len(payload.samples) for payload in payloads], dtype=np.int64),
        "prompt_lengths": np.array([len(sample.prompt_ids) for sample in samples], dtype=np.int64),
        "completion_lengths": np.array([len(sample.completion_ids) for sample in samples], dtype=np.int64),
        "prompt_ids": _join([sample.prompt_ids for sample in samples], np.int32),
        "messages_json": np.frombuffer(messages, dtype=np.uint8),
    }
    for name, dtype in _COMPLETION_FIELDS.items():
        arrays[name] = _join([getattr(sample, name) for sample in samples], dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    save_file(arrays, partial)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def load_payloads(path: Path) -> tuple[EpisodePayload, ...]:
    """The payloads that `save_payloads` wrote, in the same order. Raises ValueError if the file contradicts itself."""
    arrays = load_file(path)
    messages = json.loads(arrays["messages_json"].tobytes())
    prompts = _split(path, arrays["prompt_ids"], arrays["prompt_lengths"])
    columns = {name: _split(path, arrays[name], arrays["completion_lengths"]) for name in _COMPLETION_FIELDS}
    samples = [
        Sample(prompt_ids=prompt, **{name: column[index] for name, column in columns.items()})
        for index, prompt in enumerate(prompts)
    ]
    counts = arrays["samples_per_payload"].tolist()
    if sum(counts) != len(samples) or len(counts) != len(messages):
        raise ValueError(
            f"{path} is damaged: {len(counts)} payloads of {sum(counts)} samples announced, {len(messages)} "
            f"conversations and {len(samples)} samples found; delete the checkpoint that it belongs to"
        )
    remaining = iter(samples)
    return tuple(
        EpisodePayload(samples=[next(remaining) for _ in range(count)], messages=conversation)
        for count, conversation in zip(counts, messages, strict=True)
    )


def _join(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype, copy=False)


def _split(path: Path, values: NDArray[Any], lengths: NDArray[Any]) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths).tolist()
    if (ends[-1] if ends else 0) != len(values):
        raise ValueError(f"{path} is damaged: {ends[-1] if ends else 0} values announced, {len(values)} found")
    return [values[end - int(length) : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
