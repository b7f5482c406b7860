"""A run's checkpoint -> README.md of the exported model, as the hub shows it."""

from pathlib import Path

import yaml

from rlflow import __version__
from rlflow.models.resolve import BUILTIN
from rlflow.telemetry.text import number, printable
from rlflow.tools.runs.read import HELD_OUT, LAST_STEPS, REWARD, read_run


def model_card(run: Path, step: int, name: str, *, adapter_only: bool) -> str:
    """Markdown with the hub's header. Figures are those of the run's end. Raises ConfigError when it cannot be read."""
    ended = read_run(run)
    base, recipe = str(ended.of("model", "path")), ended.of("run", "name")
    header = {
        "library_name": "peft" if adapter_only else "transformers",
        "tags": ["rlflow", "reinforcement-learning"],
        # The hub knows only models of its own.
        **({} if base in BUILTIN or Path(base).expanduser().is_dir() else {"base_model": base}),
    }
    figures = {
        f"reward, mean of the last {LAST_STEPS} steps": ended.final(REWARD),
        "held-out reward before": next(iter(ended.curve(HELD_OUT).values()), None),
        "held-out reward at the end": ended.final(HELD_OUT),
    }
    table = "\n".join(f"| {label} | {number(value)} |" for label, value in figures.items() if value is not None)
    settings = printable(yaml.safe_dump(ended.settings, sort_keys=False))
    return f"""---
{yaml.safe_dump(header, sort_keys=False)}---

# {name}

{"Adapters for" if adapter_only else "A version of"} `{base}`, trained with reinforcement learning: recipe `{recipe}`,
environment `{ended.of("env", "name")}`, checkpoint of step {step}. Written by rlflow {__version__}.

The licence is not known to rlflow: that of the base model and of the data holds. Add `license:` to the header.

| figure of the run, which ended at step {ended.step} | |
|---|---|
{table}

<details><summary>All settings</summary>

```yaml
{settings}```

</details>
"""
