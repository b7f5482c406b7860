"""`rlflow train ... --dry-run`: what the run would need. Starts nothing, and reads no weights."""

from __future__ import annotations

import json
from pathlib import Path

from rlflow.config import Config


def dry_run(config: Config, *, as_json: bool) -> int:
    """Print the estimate; returns the exit code, 0. Raises ConfigError for what the run would refuse."""
    from rlflow.algorithms.registry import check_functions
    from rlflow.models.resolve import REWARD, check_gives_score, resolve_config
    from rlflow.tools.dry_run import render
    from rlflow.tools.dry_run.estimate import estimate
    from rlflow.tools.dry_run.model import read_model, read_reward_model  # imports torch and transformers
    from rlflow.workers.engine.setup import check_engine
    from rlflow.workers.trainer.policy import MAX_LOGITS

    check_functions(config)
    folder = resolve_config(config.model.path)
    facts = read_model(config, folder)
    check_engine(config, facts.cache, folder, on_gpu=True)
    scorer = None
    if config.reward.model is not None:
        scorer_folder = resolve_config(config.reward.model, REWARD)
        check_gives_score(Path(scorer_folder))
        scorer = read_reward_model(config, scorer_folder)
    found = estimate(config, facts, MAX_LOGITS, scorer)
    print(json.dumps(render.as_json(found)) if as_json else render.as_text(found, config))
    return 0
