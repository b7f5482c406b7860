"""Reward functions that come with rlflow: each module has one, by its own name, which `reward.function` may name."""
