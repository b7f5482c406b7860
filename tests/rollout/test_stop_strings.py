"""Stop strings: the reply that is left is what was sampled up to them."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.rollout.stopping import Ending, first_stop, stopped


def parse(ids: Sequence[int]) -> str:
    return "".join({1: "one ", 2: "two ", 3: "th", 4: "ree. x"}[token] for token in ids)


def from_bytes(ids: Sequence[int]) -> str:
    """As a byte-level tokenizer, whose tokens may be pieces of a character."""
    return bytes(ids).decode(errors="replace")


def completion(*ids: int) -> Completion:
    count = len(ids)
    return Completion(
        ids=list(ids),
        logprobs=[-0.1 * each for each in range(1, count + 1)],
        versions=[7] * (count - 1) + [8],
        cache_versions=[7] * count,
        finish_reason="length",
        support=[[token, 9] for token in ids],
        experts=np.arange(3 + count - 1, dtype=np.uint8).reshape(-1, 1, 1),
    )


REQUEST = GenerateRequest(prompt_ids=[5, 5, 5], seed=None, max_new_tokens=9, prefix_key=None)


def test_the_stop_string_that_is_complete_first_counts() -> None:
    assert first_stop("one two", ["two", "e"]) == Ending(text="e", start=2)
    assert first_stop("observe", ["serve", "obs"]) == Ending(text="obs", start=0)
    assert first_stop("one", ["two"]) is None
    assert first_stop("one", []) is None


def test_a_reply_ends_with_the_token_that_completes_the_string() -> None:
    left = stopped(completion(1, 3, 4, 2), REQUEST, ["three"], parse)
    assert left.ids == [1, 3, 4]
    assert left.logprobs == [-0.1, -0.2, -0.1 * 3]
    assert (left.versions, left.cache_versions) == ([7, 7, 7], [7, 7, 7])
    assert left.support == [[1, 9], [3, 9], [4, 9]]
    assert left.finish_reason == "stop"
    assert left.experts is not None
    assert left.experts.ravel().tolist() == [0, 1, 2, 3, 4]  # 3 of the prompt, 2 of the reply


def test_routes_that_were_known_before_are_not_counted_twice() -> None:
    request = GenerateRequest(prompt_ids=[5, 5, 5], seed=None, max_new_tokens=9, prefix_key=None, num_routed=2)
    reply = completion(1, 2, 3)
    reply.experts = np.array([2, 3, 4], dtype=np.uint8).reshape(-1, 1, 1)  # of the last of the prompt, and two sampled
    left = stopped(reply, request, ["two"], parse)
    assert left.experts is not None
    assert left.experts.ravel().tolist() == [2, 3]


def test_a_reply_without_the_string_is_left_as_it_is() -> None:
    reply = completion(1, 3, 4)
    assert stopped(reply, REQUEST, ["four"], parse) is reply


def test_the_first_token_may_complete_the_string() -> None:
    assert stopped(completion(2, 2, 2, 2, 2), REQUEST, ["two"], parse).ids == [2]


@given(
    st.text("ab:\n\u00e9\U0001f600", max_size=30), st.lists(st.text("ab:\n\u00e9\U0001f600", min_size=1, max_size=3))
)
def test_it_is_the_shortest_beginning_with_a_string(text: str, stop: list[str]) -> None:
    ids = list(text.encode())
    beginnings = (ids[:count] for count in range(len(ids) + 1))
    expected = next((each for each in beginnings if any(one in from_bytes(each) for one in stop)), ids)
    assert stopped(completion(*ids), REQUEST, stop, from_bytes).ids == expected
