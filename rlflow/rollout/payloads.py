"""Payloads on disk: one safetensors file with the arrays end to end and the conversations as JSON."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from rlflow.runtime.disk import write_tensors
from rlflow.types import EpisodePayload, ImageSpan, Pictures, Sample, Support

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
        + (sample.teacher_prompt_ids.nbytes if sample.teacher_prompt_ids is not None else 0)
        for sample in payload.samples
    )


def save_payloads(path: Path, stored: Sequence[EpisodePayload | Pictures]) -> str:
    """Write payloads, and images between them, to one file, which appears when it is complete; returns its SHA-256."""
    payloads = [each for each in stored if isinstance(each, EpisodePayload)]
    samples = [sample for payload in payloads for sample in payload.samples]
    arrays: dict[str, NDArray[Any]] = {
        "samples_per_payload": np.array([len(payload.samples) for payload in payloads], dtype=np.int64),
        "prompt_lengths": np.array([len(sample.prompt_ids) for sample in samples], dtype=np.int64),
        "completion_lengths": np.array([len(sample.completion_ids) for sample in samples], dtype=np.int64),
        "prompt_ids": _join([sample.prompt_ids for sample in samples], np.int32),
        "messages_json": _as_json([payload.messages for payload in payloads]),
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
    if any(sample.teacher_prompt_ids is not None for sample in samples):
        told = [np.zeros(0, np.int32) if (ids := one.teacher_prompt_ids) is None else ids for one in samples]
        arrays["teacher_prompt_ids"] = _join(told, np.int32)
        arrays["teacher_prompt_lengths"] = np.array([len(ids) for ids in told], dtype=np.int64)
    if any(sample.images for sample in samples):
        arrays["images_json"] = _as_json([[asdict(image) for image in sample.images] for sample in samples])
    albums = {place: each for place, each in enumerate(stored) if not isinstance(each, EpisodePayload)}
    if albums:
        arrays["pictures_json"] = _as_json([[place, list(album)] for place, album in albums.items()])
        for place, album in albums.items():
            arrays |= {f"{place} {key}": np.frombuffer(file, np.uint8) for key, file in album.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    digest = write_tensors(partial, arrays)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)
    return digest


def load_payloads(path: Path) -> tuple[EpisodePayload | Pictures, ...]:
    """What `save_payloads` wrote, in the same order. Raises ValueError if the file contradicts itself."""
    arrays = load_file(path)
    messages = _from_json(arrays["messages_json"])
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
    if "teacher_prompt_ids" in arrays:
        told = _split(path, arrays["teacher_prompt_ids"], arrays["teacher_prompt_lengths"])
        for sample, ids in zip(samples, told, strict=True):
            sample.teacher_prompt_ids = ids if len(ids) else None
    if "images_json" in arrays:
        for sample, images in zip(samples, _from_json(arrays["images_json"]), strict=True):
            sample.images = tuple(ImageSpan(**image) for image in images)
    sizes = arrays["samples_per_payload"].tolist()
    if sum(sizes) != len(samples) or len(sizes) != len(messages):
        raise ValueError(
            f"{path} is damaged: {len(sizes)} payloads of {sum(sizes)} samples announced, {len(messages)} "
            f"conversations and {len(samples)} samples found; delete the checkpoint that it belongs to"
        )
    remaining = iter(samples)
    stored: list[EpisodePayload | Pictures] = [
        EpisodePayload(samples=[next(remaining) for _ in range(count)], messages=conversation)
        for count, conversation in zip(sizes, messages, strict=True)
    ]
    for place, keys in _from_json(arrays["pictures_json"]) if "pictures_json" in arrays else ():
        stored.insert(place, {key: arrays[f"{place} {key}"].tobytes() for key in keys})
    return tuple(stored)


def _as_json(value: object) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _from_json(array: NDArray[np.uint8]) -> Any:
    return json.loads(array.tobytes())


def _no_support(sample: Sample) -> Support:
    return Support(ids=np.zeros(0, np.int32), counts=np.zeros_like(sample.completion_ids))


def _join(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype, copy=False)


def _split(path: Path, values: NDArray[Any], lengths: NDArray[Any]) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths).tolist()
    if (ends[-1] if ends else 0) != len(values):
        raise ValueError(f"{path} is damaged: {ends[-1] if ends else 0} values announced, {len(values)} found")
    return [values[end - int(length) : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
