"""A conversation with a guest, played by the policy itself or by a few rules.

The reward is the share of city, nights and room that are right in the first booking; 0 without one.
"""

import random
import re
from collections.abc import Mapping, Sequence
from functools import partial

from rlflow.envs.base import Environment, EnvironmentSpec, Prompt, Step
from rlflow.envs.seeds import seeded_tasks
from rlflow.envs.texts import prompt_of
from rlflow.errors import ConfigError
from rlflow.types import Json, Message, Task

CITIES = ("Lisbon", "Oslo", "Kyoto", "Quito", "Cairo", "Perth", "Lima", "Riga")
ROOMS = ("single", "double", "family")
SYSTEM_PROMPT = """You are the clerk of a hotel chain and talk to a guest. Ask for the city, for the number of nights
and for the kind of room (single, double or family), one question at a time. When you know all three, reply with one
line: BOOK city=<city> nights=<number> room=<room>"""
GREETING = "Hello, I would like to book a room."
_BOOKING = re.compile(r"BOOK\s+city=(?P<city>[A-Za-z ]+?)\s+nights=(?P<nights>[0-9]{1,4})\s+room=(?P<room>[a-z]+)")
GUEST = "guest"
GUESTS = ("policy", "rules")
GUEST_PROMPT = """You are a guest who wants to book a hotel room: in {city}, for {nights} nights, a {room} room. Answer
the clerk's question in one short sentence. Say only what you are asked for."""


def load(
    guest: str = "policy", questions: int = 6, size: int = 2000, seed: int = 0, evaluation_size: int = 64
) -> EnvironmentSpec:
    """A booking to be made after at most `questions` questions.

    guest: who plays the guest: `policy`, the model that is trained, in a role that is not trained; or `rules`, which
    look for words.
    size: number of tasks; seed: which ones; evaluation_size: number of tasks for `eval.every`, from another seed.
    """
    if guest not in GUESTS:
        raise ConfigError(f"env.args.guest={guest} is not one of {', '.join(GUESTS)}")
    if questions < 1:
        raise ConfigError(f"env.args.questions must be at least 1; got {questions}")
    tasks, evaluation_tasks = seeded_tasks(make_tasks, size, seed, evaluation_size)
    build = partial(Dialogue, guest, questions)
    return EnvironmentSpec(tasks=tasks, build=build, evaluation_tasks=evaluation_tasks, expert=clerk)


class Dialogue(Environment):
    """Ends with a booking, or when no question is left."""

    def __init__(self, guest: str, questions: int) -> None:
        self._guest = guest
        self._left = questions
        self._wish: Mapping[str, Json] = {}
        self._said: list[Message] = []
        """The conversation as the guest sees it: the clerk is its user."""

    async def reset(self, task: Task) -> Prompt:
        self._wish = task.data
        self._said = [
            Message(role="system", content=GUEST_PROMPT.format(**task.data)),
            Message(role="user", content="Good evening, what can I do for you?"),
            Message(role="assistant", content=task.prompt[-1]["content"]),
        ]
        return Prompt(messages=list(task.prompt))

    async def step(self, reply: Message) -> Step:
        booking = _BOOKING.search(reply["content"])
        if booking is not None or self._left == 0:
            parts = booking.groupdict() if booking is not None else {}
            share_right = sum(said == str(self._wish[part]) for part, said in parts.items()) / 3
            return Step(done=True, reward=share_right, metrics={"booked": float(booking is not None)})
        self._left -= 1
        if self._guest == "rules":
            answer = by_rules(reply["content"], self._wish)
        else:
            self._said.append(Message(role="user", content=reply["content"]))
            self._said.append(await self.ask(self._said, agent=GUEST))
            answer = self._said[-1]["content"]
        return Step(messages=[Message(role="user", content=answer)], metrics={"questions": 1.0})


def by_rules(question: str, wish: Mapping[str, Json]) -> str:
    """The reply of a guest who only looks for the words city, night and room."""
    words = question.lower()
    answers = {
        "city": f"I am going to {wish['city']}.",
        "night": f"I stay for {wish['nights']} nights.",
        "room": f"A {wish['room']} room, please.",
    }
    asked = [answer for word, answer in answers.items() if word in words]
    return " ".join(asked) or "I do not understand. What do you want to know?"


def clerk(task: Task, messages: Sequence[Message]) -> str:
    """Asks for one thing after the other, then books."""
    questions = ("Which city?", "How many nights?", "Which kind of room?")
    asked = sum(message["role"] == "assistant" for message in messages)
    assert isinstance(task.answer, str)
    return questions[asked] if asked < len(questions) else task.answer


def make_tasks(size: int, seed: int) -> list[Task]:
    """`size` guests; the answer is the line that books what the guest wants."""
    chance = random.Random(f"dialogue/{seed}")
    tasks = []
    for index in range(size):
        city, nights, room = chance.choice(CITIES), chance.randint(1, 9), chance.choice(ROOMS)
        tasks.append(
            Task(
                id=f"dialogue/{seed}/{index}",
                prompt=prompt_of(SYSTEM_PROMPT, GREETING),
                answer=f"BOOK city={city} nights={nights} room={room}",
                data={"city": city, "nights": nights, "room": room},
            )
        )
    return tasks
