"""Files and the digests that are made while they are written."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from rlflow.runtime.disk import write_digested, write_tensors


@pytest.mark.parametrize("sizes", [[], [0], [5], [1 << 20], [3, (1 << 20) + 1, 0, 7]])
def test_the_digest_is_that_of_the_file(sizes: list[int], tmp_path: Path) -> None:
    parts = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    digest = write_digested(tmp_path / "file", parts)
    content = (tmp_path / "file").read_bytes()
    assert content == b"".join(parts)
    assert digest == hashlib.sha256(content).hexdigest()


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    """Of all element types, sizes and layouts; what has the largest elements comes first, so that all are aligned."""
    tensors = {
        "odd": np.array([True, False, True]),
        "bytes": np.frombuffer(b"\x00text\xff", np.uint8),
        "floats": np.array([[1.5, -0.0], [3e38, float("inf")]], np.float32),
        "turned": np.arange(6, dtype=np.int32).reshape(2, 3).T,
        "longs": np.array([-(1 << 62), 1 << 62], np.int64),
        "none": np.zeros(0, np.float32),
        "one": np.array(7, np.int32),
    }
    path = tmp_path / "tensors.safetensors"
    digest = write_tensors(path, tensors, {"updates": "3"})
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape)
        assert np.array_equal(found[name], expected)
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {"updates": "3"}
    assert path.read_bytes().index(tensors["longs"].tobytes()) % 8 == 0
    write_tensors(path, {})
    assert load_file(path) == {}
