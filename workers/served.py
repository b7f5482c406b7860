"""A model behind an OpenAI-compatible URL that says how likely given tokens are, as vLLM's server does.

    token ids -> POST URL/completions with prompt_logprobs -> log-probability of each token after those before it, and
        the likeliest tokens in its place

Other servers leave `prompt_logprobs` out of their answers, and are refused before anything is started.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import aiohttp
import numpy as np

from rlflow.algorithms.distillation import SAMPLED, TeacherOptions
from rlflow.errors import ConfigError
from rlflow.runtime.asking import NoAnswer, Refused, ask, key_headers
from rlflow.types import BoolArray, FloatArray, Likely, Support

Places: TypeAlias = Sequence[Mapping[str, Any] | None]
"""What a server says of each place of a prompt: id -> {"logprob": nats}; None for the first."""
MAX_BYTES = 1 << 20
"""Of an answer, beside what it says of tokens."""
TOKEN_BYTES = 1024
"""Of what an answer says of one token, whose text is in it."""
TOKENS_A_QUESTION = 4096
"""Tokens of the vocabulary in the text of one question."""


class ServedModel:
    """The client; used as `async with`, in one event loop."""

    def __init__(self, url: str, options: TeacherOptions) -> None:
        """Raises ConfigError if the key is not in the environment."""
        self._url, self._name = url, options.model
        self._num_likely = 0 if options.kl == SAMPLED else options.top_k
        self._headers = key_headers(options.key_variable, "teacher.args.key_variable")
        self._turns = asyncio.Semaphore(options.concurrency)

    async def __aenter__(self) -> "ServedModel":
        # `ask` has a deadline of its own, and the semaphore bounds the connections.
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=self._headers)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def find_name(self, patience_s: float) -> str:
        """What the server calls the model. Raises Refused if it has several, or not the one that was named."""
        url = f"{self._url}/models"
        answer = await self._json(url, None, patience_s, MAX_BYTES)
        names = [str(each["id"]) for each in _list(answer, "data", url) if isinstance(each, Mapping) and "id" in each]
        if self._name is None and len(names) == 1:
            (self._name,) = names
        if self._name not in names:
            chosen = "name one" if self._name is None else f"{self._name!r} is not among them"
            raise Refused(f"{url} has the models {', '.join(names) or 'none'}; {chosen} in teacher.args.model")
        return self._name

    async def places(self, tokens: Sequence[int], ends_at: float) -> Places:
        """What is said of the place of each token; see `said_of` and `likely_in`.

        Raises NoAnswer at `ends_at`, a monotonic time.
        """
        url = f"{self._url}/completions"
        # One token is sampled, because the server samples at least one.
        question = {
            "model": self._name,
            "prompt": list(tokens),
            "max_tokens": 1,
            "prompt_logprobs": self._num_likely,
            "add_special_tokens": False,
        }
        async with self._turns:
            if (patience_s := ends_at - time.monotonic()) <= 0:
                raise NoAnswer(f"{url} was so busy with other questions that this one was not asked in time")
            most = MAX_BYTES + TOKEN_BYTES * len(tokens) * (1 + self._num_likely)
            answer = await self._json(url, question, patience_s, most)
        try:
            found: Places = answer["choices"][0]["prompt_logprobs"]
            said_of(tokens, found)
            return found
        except (LookupError, TypeError, ValueError) as error:
            raise Refused(
                f"{url} did not say how likely each of {len(tokens)} tokens is, in prompt_logprobs as vLLM's server "
                f"does: {json.dumps(answer)[:200]}"
            ) from error

    async def read(self, text: str, patience_s: float) -> tuple[list[int], int]:
        """The tokens of a text, and how many tokens the server takes at once."""
        url = f"{self._url.removesuffix('/v1')}/tokenize"
        question = {"model": self._name, "prompt": text, "add_special_tokens": False}
        answer = await self._json(url, question, patience_s, MAX_BYTES + 16 * len(text.encode()))
        return _list(answer, "tokens", url), int(answer.get("max_model_len", 0))

    async def _json(self, url: str, question: Any, patience_s: float, max_bytes: int) -> Any:
        text = await ask(self._session, url, question, patience_s, max_bytes)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Refused(f"{url} did not answer with a JSON object: {text[:200]}")
        return answer


def said_of(tokens: Sequence[int], said: Places) -> FloatArray:
    """[L], of each token after those before it, 0 for the first. Raises an error of Python for what cannot be meant.

    Example: tokens 7, 8 and said [None, {"8": {"logprob": -0.5}, "9": {"logprob": -1.5}}] -> [0, -0.5]
    """
    if len(said) != len(tokens):
        raise ValueError(len(said))
    found = [0.0] + [(each or {})[str(token)]["logprob"] for token, each in zip(tokens[1:], said[1:], strict=True)]
    logprobs = np.asarray(found, np.float32)
    if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        raise ValueError("these are no log-probabilities")
    return logprobs


def likely_in(said: Places, mask: BoolArray, k: int, num_ids: int) -> Likely:
    """The `k` likeliest tokens in the places [L] of the mask, those that are among `num_ids` ids; `said` is of these
    places alone.

    Example: k 1, num_ids 9 and said [{"8": {"logprob": -0.5}, "5": {"logprob": -1.5}}] -> ids [8], logprobs [-0.5]
    """
    counts, ids, logprobs = np.zeros(len(mask), np.int32), list[int](), list[float]()
    for place, each in zip(np.flatnonzero(mask).tolist(), said, strict=True):
        assert each is not None, "only the first token of a prompt has none"
        ranked = sorted(((one["logprob"], int(token)) for token, one in each.items()), reverse=True)[:k]
        known = [(logprob, token) for logprob, token in ranked if token < num_ids]
        counts[place] = len(known)
        ids += [token for _, token in known]
        logprobs += [logprob for logprob, _ in known]
    return Likely(Support(ids=np.array(ids, np.int32), counts=counts), np.array(logprobs, np.float32))


async def check_served(model: ServedModel, tokenizer: Any, rows: int, max_length: int, patience_s: float) -> None:
    """Raise ConfigError unless the server reads texts as the policy's tokenizer, has all `rows` of the policy's tokens,
    takes `max_length` of them at once, and says how likely they are.

    Raises NoAnswer if it does not answer at all within `patience_s` a question.
    """
    await model.find_name(patience_s)
    taken = 0
    for text in texts_of_vocabulary(tokenizer):
        own = list(tokenizer.encode(text, add_special_tokens=False))
        its, taken = await model.read(text, patience_s)
        if its != own:
            place = next((i for i, (a, b) in enumerate(zip(own, its, strict=False)) if a != b), min(len(own), len(its)))
            a, b = own[place : place + 3], its[place : place + 3]
            raise ConfigError(
                "its vocabulary is not that of model.path: where the policy reads "
                f"{tokenizer.decode(own[place : place + 3])!r} as the tokens {a}, it reads {b}; serve a model of the "
                "policy's family"
            )
    if taken <= max_length:
        raise ConfigError(
            f"the server takes {taken} tokens at once (max_model_len), and model.max_length is {max_length}, beside "
            f"which it needs one; start it with --max-model-len {max_length + 1} or more, or lower model.max_length"
        )
    await model.places([0, rows - 1, 0], time.monotonic() + patience_s)


def texts_of_vocabulary(tokenizer: Any) -> Iterator[str]:
    """Texts in which every token occurs that stands for whole characters, some thousand in each, a line for each."""
    size = len(tokenizer)
    for first in range(0, size, TOKENS_A_QUESTION):
        ids = [[number] for number in range(first, min(first + TOKENS_A_QUESTION, size))]
        yield "\n".join(
            text for text in tokenizer.batch_decode(ids) if text and "\N{REPLACEMENT CHARACTER}" not in text
        )


def _list(answer: Mapping[str, Any], key: str, url: str) -> list[Any]:
    found = answer.get(key)
    if not isinstance(found, list):
        raise Refused(f"{url} answered without a list of {key}: {json.dumps(answer)[:200]}")
    return found
