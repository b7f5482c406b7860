"""What was probably meant by a name that does not exist: for settings, recipes, models, paths of code and options."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str] | Mapping[str, str], *, most: int = 1, cutoff: float = 0.6) -> str:
    """The end of an error's first sentence: "; did you mean NAME?", or "" when no similarity reaches `cutoff`.

    `known` may map each name to what is shown in its place. At most `most` names, the most similar first.
    """
    shown = known if isinstance(known, Mapping) else {each: each for each in known}
    near = get_close_matches(name, shown, n=most, cutoff=cutoff)
    return f"; did you mean {', '.join(shown[each] for each in near)}?" if near else ""
