"""Names that stand for kinds of tasks: a kind `a/b` belongs to `a`, unless `a/b` has a name of its own."""

from collections.abc import Collection


def name_for(kind: str, names: Collection[str]) -> str | None:
    """The most specific of the names that the kind belongs to; None if it belongs to none.

    Example: name_for("sums/hard", ["sums", "code"]) == "sums"
    """
    while kind not in names:
        kind, slash, _ = kind.rpartition("/")
        if not slash:
            return None
    return kind
