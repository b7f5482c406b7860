"""One game of TextArena: its calls, its random numbers, its words.

TextArena's games draw from the random numbers of the whole process and seed them, so two games in one process would
change each other. Here each game has a state of its own, which is in place only while one of its calls runs; such calls
wait for each other. Some games fetch word lists from the network when they are imported; here none does.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlflow.envs.extras import need

_ONE_AT_A_TIME = threading.Lock()


@dataclass(kw_only=True, slots=True, frozen=True)
class GameSpec:
    id: str
    num_players: int
    options: dict[str, Any]


class Game:
    """One game, from its first observation to its rewards; blocking, so call it from a thread."""

    def __init__(self, spec: GameSpec, seed: int) -> None:
        self._python_state = random.Random(seed).getstate()
        self._numpy_state = np.random.RandomState(seed).get_state()
        with self._random_numbers(), _without_downloads():
            textarena = need("textarena", "textarena")
            self._wrapped = textarena.make(spec.id, **spec.options)
            self._wrapped.reset(num_players=spec.num_players, seed=seed)
        self._bare = self._wrapped
        while isinstance(self._bare, textarena.Wrapper):
            self._bare = self._bare.env
        self._own_moves = textarena.ObservationType.PLAYER_ACTION
        self._game = textarena.GAME_ID

    def observe(self) -> tuple[int, str]:
        """Whose move it is, and what that player has not seen yet.

        The wrappers that repeat the whole history are left out: a conversation holds it already.
        """
        with self._random_numbers():
            seat, seen = self._bare.get_observation()
        others = [one for one in seen if not (one[0] == seat and one[2] is self._own_moves)]
        return seat, "\n".join(self._said(sender, text) for sender, text, _ in others).strip()

    def move(self, text: str) -> bool:
        """Whether the game is over. Wrappers around moves, such as one that adds brackets, are in force."""
        with self._random_numbers():
            is_over, _ = self._wrapped.step(action=text)
        return bool(is_over)

    def result(self, seat: int) -> tuple[float, bool]:
        """Once the game is over: the player's reward, and whether it lost by a move that the rules forbid."""
        with self._random_numbers():
            rewards, info = self._wrapped.close()
        if not rewards or seat not in rewards:
            raise RuntimeError(f"the game ended without a reward for player {seat}; got {rewards}")
        return float(rewards[seat]), bool(info.get(seat, {}).get("invalid_move", False))

    def _said(self, sender: int, text: str) -> str:
        if sender == self._game:
            return text
        return f"[{self._bare.state.role_mapping.get(sender, f'Player {sender}')}] {text}"

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        with _ONE_AT_A_TIME:
            python_state, numpy_state = random.getstate(), np.random.get_state()
            random.setstate(self._python_state)
            np.random.set_state(self._numpy_state)
            try:
                yield
            finally:
                self._python_state, self._numpy_state = random.getstate(), np.random.get_state()
                random.setstate(python_state)
                np.random.set_state(numpy_state)


@contextmanager
def _without_downloads() -> Iterator[None]:
    nltk: Any = need("nltk", "textarena")
    download = nltk.download
    nltk.download = lambda *_, **__: False
    try:
        yield
    finally:
        nltk.download = download
