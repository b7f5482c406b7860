"""What a booking is worth: the share of city, nights and room that are right."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlflow.types import Json

_BOOKING = re.compile(r"BOOK\s+city=(?P<city>[A-Za-z ]+?)\s+nights=(?P<nights>[0-9]{1,4})\s+room=(?P<room>[a-z]+)")


def booked(text: str) -> dict[str, str] | None:
    """City, nights and room of the first booking in a reply; None if there is none."""
    found = _BOOKING.search(text)
    return None if found is None else found.groupdict()


def share_right(booking: Mapping[str, str] | None, wish: Mapping[str, Json]) -> float:
    """0.0 without a booking, else the share of its three parts that the guest wanted."""
    if booking is None:
        return 0.0
    return sum(booking[part] == str(wish[part]) for part in ("city", "nights", "room")) / 3
