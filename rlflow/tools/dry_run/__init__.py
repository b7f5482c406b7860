"""What a run would need, worked out from its settings and the model's config.json: `rlflow train ... --dry-run`.

config.json -> model.py -> ModelFacts;  Config, ModelFacts -> memory.py, estimate.py -> Estimate -> command.py
"""
