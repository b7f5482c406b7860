"""The limits of an episode. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.config import Config


@dataclass(kw_only=True, slots=True, frozen=True)
class EpisodeLimits:
    max_length: int
    """Most tokens of one conversation, prompt and completion together."""
    max_new_tokens: int
    """Most sampled tokens of one reply."""
    max_turns: int
    """Most replies of the policy."""
    max_observation_chars: int
    """Most characters of one message of the environment; a longer message loses its middle."""
    setup_s: float
    """Seconds for building and resetting the environment."""
    step_s: float
    """Seconds for one step of the environment, not counting replies that it asks for."""
    episode_s: float
    """Seconds for the whole episode, generation included."""

    @classmethod
    def of(cls, config: Config) -> EpisodeLimits:
        return cls(
            max_length=config.model.max_length,
            max_new_tokens=config.rollout.max_new_tokens,
            max_turns=config.env.max_turns,
            max_observation_chars=config.env.max_observation_chars,
            setup_s=config.env.setup_timeout_s,
            step_s=config.env.step_timeout_s,
            episode_s=config.env.episode_timeout_s,
        )


def shortened(text: str, limit: int) -> str:
    """The text, or its beginning and its end with a note between them, `limit` characters and the note long.

    Example: shortened("abcdefgh", 4) == "ab\\n[... 4 characters left out ...]\\ngh"
    """
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    note = f"\n[... {len(text) - limit} characters left out ...]\n"
    return text[:head] + note + text[len(text) - tail :]
