"""`rlflow recipes [NAME]`."""

import argparse

from rlflow.settings import recipe_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this recipe")


def run(options: argparse.Namespace) -> int:
    if options.name is not None:
        print(recipe_files.recipe_text(options.name), end="")
        return 0
    names = recipe_files.recipe_names()
    width = max(map(len, names))
    print("\n".join(f"{each:{width}}  {recipe_files.recipe_summary(each)}" for each in names))
    return 0
