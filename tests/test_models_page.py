"""docs/models.md is about the transformers that is installed, and no family is trained wrongly."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PAGE = Path(__file__).parent.parent / "docs" / "models.md"


def test_every_family_has_a_row_and_none_is_wrong() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| ([a-z ]+) \|", text, re.MULTILINE)
    if f"transformers {version('transformers')}" in text:
        assert {family for family, _ in rows} == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {way for _, way in rows} == {"packed", "padded", "refused", "not built"}
    assert sum(way in ("packed", "padded") for _, way in rows) >= 110
