"""A game of TextArena, alone or against others: each reply is a move.

The reward is TextArena's, at the end of the game; a game that is not played to its end earns 0.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlflow.envs.base import Environment, EnvironmentSpec, Prompt, Step
from rlflow.envs.callables import call, load_callable
from rlflow.envs.seeds import seeded_tasks
from rlflow.envs.textarena.game import Game, GameSpec
from rlflow.envs.texts import answer_part, prompt_of, with_observation
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

POLICY_PLAYS = "policy"
OPPONENT = "opponent"
"""The name of the policy in the other seats, when it plays against itself."""


def load(
    game: str,
    num_players: int = 1,
    opponent: str | None = None,
    seat: int | None = None,
    options: Mapping[str, Any] | None = None,
    instructions: str | None = None,
    system_prompt: str = "",
    size: int = 1000,
    seed: int = 0,
    evaluation_size: int = 64,
) -> EnvironmentSpec:
    """One game of TextArena; a task is a seed of it.

    game: TextArena's id, such as GuessTheNumber-v0.
    num_players: all of them; opponent: who plays the others: "policy", the current policy, untrained in that role, or
        the path of a function from all that the player saw to its move, `async` or not.
    seat: the policy's; None: one after the other.
    options: keyword arguments for making the game; instructions: shown before the game's own words.
    size, seed: how many tasks, and which; evaluation_size: number of tasks for `eval.every`, from other seeds.
    """
    if (num_players > 1) != (opponent is not None):
        raise ConfigError(
            "env.args.opponent is needed with more than one player, and only then; "
            f"got num_players={num_players} and opponent={opponent}"
        )
    if seat is not None and not 0 <= seat < num_players:
        raise ConfigError(f"env.args.seat must be from 0 to {num_players - 1}; got {seat}")
    spec = GameSpec(id=game, num_players=num_players, options=dict(options or {}))
    _opponent(opponent)
    try:  # a game is started, so that what is wrong shows now
        Game(spec, seed=0).observe()
    except ConfigError:
        raise
    except LookupError as error:  # nltk's, for data that is not there
        names = "words averaged_perceptron_tagger_eng"
        raise ConfigError(
            f"env.args.game={spec.id} needs word lists that are not on this machine; on every machine of the cluster "
            f"run once: python -m nltk.downloader {names}"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"env.name=textarena: cannot start {spec.id} with {spec.num_players} players and {spec.options}: "
            f"{type(error).__name__}: {error}"
        ) from error
    prompt = prompt_of(system_prompt, f"You play {game}." if instructions is None else instructions)
    tasks, evaluation_tasks = seeded_tasks(partial(_tasks, spec, prompt, seat), size, seed, evaluation_size)
    return EnvironmentSpec(tasks=tasks, build=partial(TextArena, spec, opponent), evaluation_tasks=evaluation_tasks)


class TextArena(Environment):
    """One game; the other players move within the policy's step."""

    def __init__(self, spec: GameSpec, opponent: str | None) -> None:
        self._spec = spec
        self._opponent = _opponent(opponent)
        self._game: Game
        self._seat = 0
        self._conversations: dict[int, list[Message]] = {}
        """Seat -> the conversation of the player in it; the policy's is not here."""

    async def reset(self, task: Task) -> Prompt:
        seed, seat = task.data["seed"], task.data["seat"]
        assert isinstance(seed, int) and isinstance(seat, int)
        self._seat = seat
        self._game = await asyncio.to_thread(Game, self._spec, seed)
        observation = await self._others_move()
        if observation is None:
            raise RuntimeError("the game was over before the policy's first move")
        return Prompt(messages=with_observation(task.prompt, observation))

    async def step(self, reply: Message) -> Step:
        is_over = await asyncio.to_thread(self._game.move, answer_part(reply))
        observation = None if is_over else await self._others_move()
        metrics = {"textarena/moves": 1.0}
        if observation is not None:
            return Step(messages=[Message(role="user", content=observation)], reward=0.0, metrics=metrics)
        reward, is_forbidden = await asyncio.to_thread(self._game.result, self._seat)
        return Step(done=True, reward=reward, metrics={**metrics, "textarena/forbidden_move": float(is_forbidden)})

    async def _others_move(self) -> str | None:
        """Let the others move until it is the policy's turn: what it sees then, or None if the game ended before."""
        while True:
            seat, seen = await asyncio.to_thread(self._game.observe)
            if seat == self._seat:
                return seen or "It is your move."
            conversation = self._conversations.setdefault(seat, [])
            conversation[:] = with_observation(conversation, seen or "It is your move.")
            reply = await self._reply_of_other(conversation)
            conversation.append(reply)
            if await asyncio.to_thread(self._game.move, answer_part(reply)):
                return None

    async def _reply_of_other(self, conversation: list[Message]) -> Message:
        if self._opponent is None:
            return await self.ask(conversation, agent=OPPONENT)
        move = await call(self._opponent, "\n".join(message["content"] for message in conversation))
        if not isinstance(move, str):
            raise TypeError(f"the opponent must return its move as a text; got {move!r:.80}")
        return Message(role="assistant", content=move)


def _tasks(spec: GameSpec, prompt: tuple[Message, ...], seat: int | None, size: int, seed: int) -> list[Task]:
    tasks = []
    for number in range(seed, seed + size):
        chosen = number % spec.num_players if seat is None else seat
        tasks.append(Task(id=f"{spec.id}/{number}", prompt=prompt, data={"seed": number, "seat": chosen}))
    return tasks


def _opponent(path: str | None) -> Callable[[str], object] | None:
    """The function that moves for the other players; None if the policy does, or if there are none."""
    return None if path is None or path == POLICY_PLAYS else load_callable("opponent", path)
