"""Payloads on disk: one safetensors file with the arrays end to end and the conversations as JSON."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from rlflow.runtime.disk import write_tensors
from rlflow.types import EpisodePayload, Sample, Support

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
        sample.prompt_ids.nbytes
        + sum(getattr(sample, name).nbytes for name in _COMPLETION_FIELDS)
        + (sample.support.ids.nbytes + sample.support.counts.nbytes if sample.support is not None else 0)
        + (sample.experts.nbytes if sample.experts is not None else 0)
        for sample in payload.samples
    )


def save_payloads(path: Path, payloads: Sequence[EpisodePayload]) -> str:
    """Write payloads to one file, which appears when it is complete; returns its SHA-256."""
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
    if any(sample.support is not None for sample in samples):
        supports = [sample.support or _no_support(sample) for sample in samples]
        arrays["support_ids"] = _join([support.ids for support in supports], np.int32)
        arrays["support_counts"] = _join([support.counts for support in supports], np.int32)
    if routes := [sample.experts for sample in samples if sample.experts is not None]:
        arrays["experts"] = np.concatenate(routes)
        arrays["has_experts"] = np.array([sample.experts is not None for sample in samples])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    digest = write_tensors(partial, arrays)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)
    return digest


def load_payloads(path: Path) -> tuple[EpisodePayload, ...]:
    """The payloads that `save_payloads` wrote, in the same order. Raises ValueError if the file contradicts itself."""
    arrays = load_file(path)
    messages = json.loads(arrays["messages_json"].tobytes())
    prompts = _split(path, arrays["prompt_ids"], arrays["prompt_lengths"])
    columns = {name: _split(path, arrays[name], arrays["completion_lengths"]) for name in _COMPLETION_FIELDS}
    samples = [
        Sample(
            prompt_ids=prompt,
            completion_ids=ids,
            loss_mask=mask,
            logprobs=logprobs,
            versions=versions,
            cache_versions=cache_versions,
        )
        for prompt, ids, mask, logprobs, versions, cache_versions in zip(prompts, *columns.values(), strict=True)
    ]
    if "support_counts" in arrays:
        counts = _split(path, arrays["support_counts"], arrays["completion_lengths"])
        ids = _split(path, arrays["support_ids"], np.array([each.sum() for each in counts], np.int64))
        for sample, own_ids, own_counts in zip(samples, ids, counts, strict=True):
            sample.support = Support(ids=own_ids, counts=own_counts) if len(own_ids) else None
    if "experts" in arrays:
        lengths = arrays["has_experts"] * np.array([sample.num_tokens for sample in samples], np.int64)
        for sample, experts in zip(samples, _split(path, arrays["experts"], lengths), strict=True):
            sample.experts = experts if len(experts) else None
    sizes = arrays["samples_per_payload"].tolist()
    if sum(sizes) != len(samples) or len(sizes) != len(messages):
        raise ValueError(
            f"{path} is damaged: {len(sizes)} payloads of {sum(sizes)} samples announced, {len(messages)} "
            f"conversations and {len(samples)} samples found; delete the checkpoint that it belongs to"
        )
    remaining = iter(samples)
    return tuple(
        EpisodePayload(samples=[next(remaining) for _ in range(count)], messages=conversation)
        for count, conversation in zip(sizes, messages, strict=True)
    )


def _no_support(sample: Sample) -> Support:
    return Support(ids=np.zeros(0, np.int32), counts=np.zeros_like(sample.completion_ids))


def _join(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype, copy=False)


def _split(path: Path, values: NDArray[Any], lengths: NDArray[Any]) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths).tolist()
    if (ends[-1] if ends else 0) != len(values):
        raise ValueError(f"{path} is damaged: {ends[-1] if ends else 0} values announced, {len(values)} found")
    return [values[end - int(length) : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
