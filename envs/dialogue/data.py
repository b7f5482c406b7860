"""Guests: each has a city, a number of nights and a room in mind."""

from __future__ import annotations

import random

from rlflow.envs.texts import prompt_of
from rlflow.types import Task

CITIES = ("Lisbon", "Oslo", "Kyoto", "Quito", "Cairo", "Perth", "Lima", "Riga")
ROOMS = ("single", "double", "family")
SYSTEM_PROMPT = """You are the clerk of a hotel chain and talk to a guest. Ask for the city, for the number of nights
and for the kind of room (single, double or family), one question at a time. When you know all three, reply with one
line: BOOK city=<city> nights=<number> room=<room>"""
GREETING = "Hello, I would like to book a room."


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
