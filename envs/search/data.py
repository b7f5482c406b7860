"""A library of made-up people, books and towns, and questions that chain two of its facts."""

import random
from dataclasses import dataclass

from rlflow.envs.texts import prompt_of
from rlflow.types import Task

SYLLABLES = ("ba", "do", "fen", "ga", "hil", "ka", "lor", "mi", "nu", "per", "qua", "ris", "sol", "ta", "ven", "zo")
COUNTRIES = ("Aldova", "Brenia", "Corvia", "Delmar", "Estoria", "Fareland")
NUM_TOWNS = 40
NUM_PEOPLE = 120
SYSTEM_PROMPT = """You answer questions from a library. Think between <think> and </think>, search as often as you need,
and give the answer, in a few words, between <answer> and </answer>."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Library:
    """Documents, and the facts that they were written from."""

    documents: tuple[str, ...]
    country_of: dict[str, str]
    """Town -> country."""
    town_of: dict[str, str]
    """Person -> town of birth."""
    author_of: dict[str, str]
    """Book -> person."""


def make_library(seed: int) -> Library:
    """The same library for the same seed: one document a town, and one a person with a book."""
    chance = random.Random(f"search/library/{seed}")
    made_up: dict[str, None] = {}  # in the order in which they were drawn
    while len(made_up) < NUM_TOWNS + 3 * NUM_PEOPLE:
        made_up["".join(chance.choices(SYLLABLES, k=chance.randint(2, 3))).capitalize()] = None
    names = iter(made_up)
    towns = [next(names) for _ in range(NUM_TOWNS)]
    country_of = {town: chance.choice(COUNTRIES) for town in towns}
    people = [f"{next(names)} {next(names)}" for _ in range(NUM_PEOPLE)]
    town_of = {person: chance.choice(towns) for person in people}
    author_of = {f"The {next(names)} Letters": person for person in people}
    documents = [f"{town} is a town in {country_of[town]}, known for its old harbour." for town in towns]
    documents += [
        f"{person} was born in {town_of[person]} and wrote the novel '{book}'." for book, person in author_of.items()
    ]
    chance.shuffle(documents)
    return Library(documents=tuple(documents), country_of=country_of, town_of=town_of, author_of=author_of)


def make_tasks(library_seed: int, size: int, seed: int) -> list[Task]:
    """`size` questions about one library; `data` has the searches that answer each."""
    library = make_library(library_seed)
    chance = random.Random(f"search/{library_seed}/{seed}")
    books, people = list(library.author_of), list(library.town_of)
    tasks = []
    for index in range(size):
        if index % 2:
            book = chance.choice(books)
            person, question = library.author_of[book], f"In which town was the author of '{book}' born?"
            answer, searches = library.town_of[person], [book]
        else:
            person = chance.choice(people)
            town, question = library.town_of[person], f"In which country was {person} born?"
            answer, searches = library.country_of[town], [person, f"{town} is a town in"]
        tasks.append(
            Task(
                id=f"search/{library_seed}/{seed}/{index}",
                prompt=prompt_of(SYSTEM_PROMPT, question),
                answer=answer,
                kind="two searches" if len(searches) == 2 else "one search",
                data={"searches": list(searches)},
            )
        )
    return tasks
