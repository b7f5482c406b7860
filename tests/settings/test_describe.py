"""The settings' texts: none is missing, the help shows them, and the pages made from them are up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.errors import ConfigError
from rlflow.settings.describe import help_page, sections, settings
from rlflow.settings.explain import leaf_keys
from rlflow.telemetry import metrics

ROOT = Path(__file__).parent.parent.parent


def test_every_setting_has_a_text_and_every_section() -> None:
    found = {each.key: each for each in settings()}
    assert set(leaf_keys()) <= set(found)
    assert [each.key for each in found.values() if not each.meaning] == []
    assert [name for name, about in sections().items() if not about] == []
    order = found["staleness.order"]
    assert (order.default, order.takes) == ("oldest_first", "one of oldest_first, ready_first")
    aggregation = found["algorithm.aggregation"].meaning
    assert aggregation.startswith("How a step averages over tokens and replies. `token_mean`: Every token weighs the ")
    assert found["run.profile_steps"].takes == "a list of whole numbers, or null"
    assert found["cluster.pools.NAME.machines"].default == "null"


def test_help_shows_all_settings_a_section_or_those_with_a_word() -> None:
    page = help_page([])
    assert max(map(len, page.splitlines())) <= 80
    assert page.startswith("usage: rlflow train recipe=NAME")
    assert all(f"\n  {key}=" in page for key in leaf_keys())
    assert help_page(["lora"]).splitlines()[:4] == [
        "lora: Low-rank adapters (arXiv:2106.09685) on linear layers of the decoder",
        "layers; the rest of the model is frozen. The critic has them too, and its head",
        "is trained whole.",
        "  lora.rank=null",
    ]
    keys = [line.strip() for line in help_page(["nats"]).splitlines() if line.startswith("  a")]
    assert keys == ["algorithm.kl_target=null", "algorithm.entropy_target=null", "algorithm.entropy_high=null"]
    with pytest.raises(ConfigError, match="no setting has nonsense in its text; the sections are run, model, env"):
        help_page(["nonsense"])


def test_every_metric_has_a_text() -> None:
    assert [name for name in (*metrics.REQUIRED, *metrics.EVALUATION) if metrics.text_of(name) is None] == []
    assert metrics.text_of("rewards/math/mean") == (
        "reward",
        "The mean of one reward function, before its weight.",
        ("Those that should rise do; if only one of several rises, look at the samples."),
    )
    assert metrics.text_of("memory/trainer_peak_gb/rank_3") is not None
    assert metrics.text_of("rewards") is None


def test_the_reference_pages_are_up_to_date() -> None:
    code = (
        "import runpy; names = runpy.run_path('scripts/reference.py')\n"
        "for name, page in names['PAGES'].items():\n"
        "    assert (names['DOCS'] / f'{name}.md').read_text() == page(), f'docs/{name}.md'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"run python scripts/reference.py\n{done.stderr}"
