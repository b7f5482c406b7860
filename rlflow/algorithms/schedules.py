"""The learning rate of each step: a warm-up, then a schedule that ends at the last step of the run. Pure."""

import math

from rlflow.config import Schedule, TrainerConfig
from rlflow.errors import ConfigError


def learning_rate(trainer: TrainerConfig, step: int, num_steps: int) -> float:
    """The rate of every update of the step after `step` others, in a run of `num_steps` steps.

    It depends on nothing else, so a resumed run goes on exactly. With another run.steps, what is left of the schedule
    changes. A step of which no update was applied does not count, so the schedule may end before the floor.

    Example: learning_rate=1, warmup_steps=2, schedule=linear, floor=0.2 and 6 steps: 0.5, 1, 1, 0.8, 0.6, 0.4
    """
    if step < trainer.warmup_steps:
        return trainer.learning_rate * ((step + 1) / trainer.warmup_steps)
    decay_steps = max(1, num_steps - trainer.warmup_steps)
    progress = min(1.0, (step - trainer.warmup_steps) / decay_steps)
    return trainer.learning_rate * _share_at(trainer.schedule, progress, floor=trainer.schedule_args.get("floor", 0.0))


def _share_at(schedule: Schedule, progress: float, *, floor: float) -> float:
    """The share of the full rate when `progress` [0, 1] of the steps after the warm-up are done."""
    match schedule:
        case Schedule.constant:
            return 1.0
        case Schedule.linear:
            left = 1.0 - progress
        case Schedule.cosine:
            left = (1.0 + math.cos(math.pi * progress)) / 2
    return floor + (1.0 - floor) * left


def share_power(trainer: TrainerConfig) -> float:
    """The power of the effective share of the tokens that each update's rate is multiplied by; 0 changes nothing.

    VCPO (arXiv:2602.17616) takes the root, 0.5, for optimisers like AdamW, and counts whole sequences. Here tokens are
    counted, because the rounding of an engine adds up over a long sequence to a ratio that says nothing of its age.
    """
    return trainer.schedule_args.get("effective_share", 0.0)


def check_schedule(trainer: TrainerConfig, num_steps: int) -> None:
    """Raise ConfigError for options that `trainer.schedule` does not take, or a warm-up that leaves it no step."""
    unknown = sorted(trainer.schedule_args.keys() - {"floor", "effective_share"})
    if unknown:
        raise ConfigError(f"trainer.schedule_args takes floor and effective_share; got {', '.join(unknown)}")
    power = share_power(trainer)
    if isinstance(power, bool) or not isinstance(power, int | float) or not 0 <= power <= 1:
        raise ConfigError(
            f"trainer.schedule_args.effective_share must be a power from 0, which is off, to 1; got {power}"
        )
    floor = trainer.schedule_args.get("floor", 0.0)
    if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 <= floor < 1:
        raise ConfigError(
            f"trainer.schedule_args.floor must be a share of trainer.learning_rate in [0, 1); got {floor}"
        )
    if trainer.schedule is not Schedule.constant and trainer.warmup_steps >= num_steps:
        raise ConfigError(
            f"trainer.schedule={trainer.schedule} has no effect with trainer.warmup_steps={trainer.warmup_steps}, "
            f"because run.steps={num_steps}; lower trainer.warmup_steps, or set trainer.schedule=constant"
        )
