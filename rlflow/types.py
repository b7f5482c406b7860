"""The words of the system, in the order in which they follow each other:

    Task -> GroupOrder -> Turns -> Transcript -> Verdict, Samples -> PlayedGroup -> ReadyGroup -> TrainSamples

What carries tokens (Turn, Sample, EpisodePayload, TrainSample) is read by workers only and lies in Ray's object store.
Everything else is small metadata: the driver holds counts, versions, rewards and handles, and never a token.

Shape letters: P prompt tokens, L completion tokens (everything after the prompt, observations included).

The examples tell one episode. The policy is asked for 2 + 3 (tokens 7 8) and replies 4 (tokens 41 42, sampled under
version 3 of the weights). The environment says "again" (token 51). Version 4 has arrived meanwhile; under it the policy
replies 5 (token 43).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, NotRequired, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int32]
FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
ExpertArray: TypeAlias = NDArray[np.uint8 | np.uint16]
"""[tokens, layers, k], the experts that each layer chose for a token: its route. uint8 if a layer has fewer than 256
experts. The largest value of the dtype is no expert: a token without a route has it everywhere."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
PayloadRef: TypeAlias = object
"""A handle to an EpisodePayload or to Pictures: a Ray ObjectRef in a run, anything in a test. The driver opens none."""

NO_VERSION = -1
"""The version of a token that no policy of this run has sampled."""


class FunctionCall(TypedDict):
    """What a model asks a tool for."""

    name: str
    arguments: str
    """A JSON object if the model wrote one; whatever it wrote otherwise."""


class ToolCall(TypedDict):
    """One call of a tool, in OpenAI's form."""

    id: str
    type: Literal["function"]
    function: FunctionCall


ROLES = ("system", "developer", "user", "assistant", "tool")
"""Whose a message may be: templates leave out what another role says, and do not say so."""


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """An image within a message. Example: ImagePart(type="image", image="a3f5..")"""

    type: Literal["image"]
    image: str
    """Its file as a data URL (`data:image/png;base64,..`); once a runner has taken it up, the key of that file."""


Part: TypeAlias = "TextPart | ImagePart"


class Message(TypedDict):
    """One chat message, in OpenAI's form.

    Example: Message(role="tool", content="12", tool_call_id="call_0")
    """

    role: str
    content: str
    """The text; for a sampled reply, all that was sampled, tool calls included, without special tokens. Where the
    message shows an image it says [image]."""
    parts: NotRequired[list[Part]]
    """Texts and images in their order, of a message that shows an image; see `rlflow.envs.images`."""
    tool_calls: NotRequired[list[ToolCall]]
    """Only from an assistant; never empty."""
    tool_call_id: NotRequired[str]
    """Only from a tool: the call that this answers."""
    name: NotRequired[str]


@dataclass(kw_only=True, slots=True, frozen=True)
class Task:
    """What the policy is asked to do.

    Example: Task(id="chain_sum/17", prompt=({"role": "user", "content": "2 + 3 ="},), answer="5")
    """

    id: str
    """Unique within the data set; the ledger counts by it."""
    prompt: tuple[Message, ...]
    prompt_is_text: bool = False
    """Whether the data had a text, which `prompt` ends with, rather than messages; functions of TRL are given text."""
    answer: Json = None
    """What the reward compares with, of the type that the data has; None when the environment needs no answer."""
    kind: str = ""
    """Tasks of one kind have rewards on one scale; algorithm.advantage=grpo_task_std normalises by kind."""
    demonstrations: tuple[tuple[Message, ...], ...] = ()
    """What follows the prompt, replies included, if that is given and not sampled: one for each episode of the task's
    group, the best one first."""
    data: dict[str, Json] = field(default_factory=dict)
    """Any further columns of the row."""


class EpisodeEnd(StrEnum):
    """How an episode ended. Error ends have no verdict and never enter training or group statistics."""

    COMPLETED = "completed"
    TRUNCATED_LENGTH = "truncated_length"
    """A reply was cut off, or the conversation left no room for another one."""
    MAX_TURNS = "max_turns"
    PROMPT_TOO_LONG = "prompt_too_long"
    EMPTY_COMPLETION = "empty_completion"
    SETUP_ERROR = "setup_error"
    SETUP_TIMEOUT = "setup_timeout"
    ENVIRONMENT_ERROR = "environment_error"
    STEP_TIMEOUT = "step_timeout"
    EPISODE_TIMEOUT = "episode_timeout"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_INVALID = "reward_invalid"
    NO_VERDICT = "no_verdict"
    CANCELLED = "cancelled"  # the group was full before (rollout.oversample_episodes)

    @property
    def is_truncated(self) -> bool:
        return self in (EpisodeEnd.TRUNCATED_LENGTH, EpisodeEnd.MAX_TURNS)

    @property
    def is_error(self) -> bool:
        return self is not EpisodeEnd.COMPLETED and not self.is_truncated


@dataclass(kw_only=True, slots=True, frozen=True)
class ImageSpan:
    """Where an image stands among tokens: a processor has written `num_tokens` of them in the place of one.

    Example: tokens 7 90 90 90 8, where 90 is the model's token for a piece of an image: start 1, num_tokens 3
    """

    key: str
    """The SHA-256 of the image's file, in hexadecimal digits."""
    start: int
    num_tokens: int
    """With those that frame the pieces."""


Pictures: TypeAlias = Mapping[str, bytes]
"""Key -> the image's file, as PNG or JPEG."""


@dataclass(kw_only=True, slots=True)
class Turn:
    """One reply of the policy: what it saw, what it sampled, under which version each token was sampled.

    Example, the second reply: Turn(prompt_ids=[7, 8, 41, 42, 51], output_ids=[43], logprobs=[-0.2], versions=[4],
        cache_versions=[4], finish_reason="stop", continues=0)
    """

    prompt_ids: list[int]
    """All tokens before the reply."""
    output_ids: list[int]  # [num_output_tokens]
    logprobs: list[float]  # [num_output_tokens], behaviour policy, temperature applied
    versions: list[int]  # [num_output_tokens], policy version that sampled each token
    cache_versions: list[int]  # [num_output_tokens], the oldest version that computed any of its context
    finish_reason: str  # "stop" or "length"
    support: list[list[int]] | None = None  # [num_output_tokens], the tokens that each one was chosen among; None: all
    experts: ExpertArray | None = None
    """[R, layers, k], of the tokens of prompt and output from `first_routed` on. The last token has no route, because
    the model has not read it. None: a dense model, or an engine that does not say."""
    first_routed: int = 0  # earlier tokens have their routes in the turns that this one continues
    continues: int | None = None  # index of the earlier turn whose prompt and output `prompt_ids` begins with
    teacher_prompt_ids: list[int] | None = None  # as in Sample, of a turn that continues none
    anchor: str = ""  # names what the policy was told since `continues`; see TurnSummary
    reward: float = 0.0  # what the environment gave for it
    images: tuple[ImageSpan, ...] = ()  # those in prompt_ids, in their order


@dataclass(kw_only=True, slots=True)
class Support:
    """The tokens that each token of a completion was chosen among, when top_k, top_p or min_p leave others out.

    Example: the first token was 7 or 9, the second was observed, the third 5: ids [7 9 5], counts [2 0 1].
    """

    ids: IntArray  # [K], place after place
    counts: IntArray  # [L], 0 where the token was chosen among all, or was not sampled


@dataclass(kw_only=True, slots=True)
class Sample:
    """One token sequence to train on: one prompt, then everything that followed it.

    Example:
        prompt_ids     [7 8]
        completion_ids [  41   42   51   43]
        loss_mask      [   1    1    0    1]
        logprobs       [-0.1 -0.7  0.0 -0.2]
        versions       [   3    3   -1    4]
        cache_versions [   3    3   -1    4]
    """

    prompt_ids: IntArray  # [P]
    completion_ids: IntArray  # [L]
    loss_mask: BoolArray  # [L], True where the policy sampled the token
    logprobs: FloatArray  # [L], behaviour policy; 0 where loss_mask is False
    versions: IntArray  # [L], NO_VERSION where loss_mask is False, and in demonstrations
    cache_versions: IntArray  # [L], at most `versions`
    """The oldest version that computed any of the keys and values the token was sampled with: older than `versions` for
    the tokens after an update, if the engine kept its cache (rollout.keep_cache). NO_VERSION as in `versions`."""
    support: Support | None = None
    """None if every token was chosen among all."""
    experts: ExpertArray | None = None
    """[P + L, layers, k], what a mixture of experts chose when the tokens were sampled; None if no route is known."""
    images: tuple[ImageSpan, ...] = ()  # in their order; the pixels are elsewhere, once for the whole group
    teacher_prompt_ids: IntArray | None = None  # what a teacher reads before the completion; None: prompt_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(kw_only=True, slots=True)
class EpisodePayload:
    """What the object store holds for one episode: in the example one Sample, and its four messages."""

    samples: list[Sample]
    """One, or more when the chat template broke the token prefix and the episode forked."""
    messages: list[Message]
    """The conversation, for people to read."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Transcript:
    """All that a reward may look at: an episode that ended, as text.

    Example: prompt "2 + 3 ="; completion "4", "again", "5"; text "5"; num_sampled 3
    """

    task: Task
    prompt: tuple[Message, ...]
    """What the policy saw before its first reply."""
    completion: tuple[Message, ...]
    """Everything after the prompt: its replies, and what the environment said."""
    environment_reward: float | None
    """The sum of what the environment gave; None when it gave nothing."""
    end: EpisodeEnd
    num_sampled: int
    """Tokens in all replies."""
    completion_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32), compare=False)  # [L]
    """The tokens after the prompt; of an episode that forked, those of all samples."""

    @property
    def response(self) -> str:
        """All messages after the prompt, one after the other: replies, and what the environment said."""
        return "\n".join(message["content"] for message in self.completion)

    @property
    def text(self) -> str:
        """The last reply, "" when there is none."""
        replies = (message["content"] for message in reversed(self.completion) if message["role"] == "assistant")
        return next(replies, "")


@dataclass(kw_only=True, slots=True, frozen=True)
class Verdict:
    """What a reward function said. `reward` is None when there is no verdict; a failure is never a reward of 0.

    Example: Verdict(reward=1.0), or Verdict(reward=None, end=EpisodeEnd.REWARD_TIMEOUT, detail="after 5 s")
    """

    reward: float | None
    end: EpisodeEnd | None = None
    """Set when scoring failed (REWARD_ERROR, _TIMEOUT or _INVALID); as the episode ended, when no reward is wanted."""
    detail: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    awaits_group: bool = False
    """Whether functions that see the whole group have a say too; this is what the others said."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Span:
    """One phase of one actor, for the trace."""

    actor: str
    name: str
    start_s: float
    """Seconds since the epoch."""
    end_s: float
    facts: dict[str, int | str] = field(default_factory=dict)
    """What it was about, as far as that is known: group, version, oldest_version, tokens, outcome."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TurnSummary:
    """Metadata of one reply within an episode."""

    anchor: str
    """Identifies what the policy had been told before it replied: equal for equal prompts or observations."""
    num_loss_tokens: int
    place: int
    """How many turns of the episode came before it in time; those of one sample are not always neighbours."""
    reward: float = 0.0
    """What the environment gave for it; 0 for every turn if the episode's reward is not the sum of that."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EpisodeSummary:
    """Metadata of one episode."""

    end: EpisodeEnd
    reward: float | None  # None: there is no verdict, or none is wanted
    num_prompt_tokens: int  # before the first reply
    num_completion_tokens: int
    """All others, observations included; what its samples begin with in common counts once."""
    num_loss_tokens: int
    oldest_version: int
    """The oldest of any token; a token is as old as its cache."""
    newest_version: int
    detail: str = ""
    close_failure: str = ""
    """Why its environment did not close; the episode counts all the same."""
    metrics: dict[str, float] = field(default_factory=dict)
    turns: tuple[TurnSummary, ...] = ()
    """In the order of the samples."""

    @property
    def is_trainable(self) -> bool:
        return self.reward is not None and not self.end.is_error


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupOrder:
    """The driver's order to play one group: several episodes of one task."""

    group_id: int
    task: Task
    num_episodes: int
    seed: int
    """Episode i of the group samples with a seed derived from (seed, i)."""
    num_spare: int = 0
    """So many of the episodes, the slowest, are cancelled when the others have ended."""
    is_last_greedy: bool = False
    """Whether the last episode takes the likeliest token each time. It is a baseline, and is not trained on."""
    engine: int | None = None
    """The engine that must play it, pinned to one version for an evaluation; None lets the client choose."""


@dataclass(kw_only=True, slots=True)
class PlayedGroup:
    """A group after play and scoring: metadata, and a handle to each episode's payload.

    Example: group 12 with rewards 1, 0, 1 and None, because scoring the last episode timed out.
    """

    group_id: int
    episodes: list[EpisodeSummary]
    payloads: list[PayloadRef]  # one for each of `episodes`
    num_bytes: int
    """Size of the payloads in the object store."""
    spans: list[Span] = field(default_factory=list)
    crowded_share: float = 0.0
    """Share of the parts of its replies that came from an engine in which other replies waited for room."""
    num_images: int = 0  # different ones, that its episodes show
    pictures: PayloadRef | None = None  # a handle to them (`Pictures`), which counts in `num_bytes`


@dataclass(kw_only=True, slots=True)
class ReadyGroup:
    """A group that may be trained on: only its trainable episodes, each with its advantage.

    Example, with algorithm.advantage=grpo: rewards 1, 0, 1 -> advantages [[0.58], [-1.15], [0.58]]
    """

    group_id: int
    task_id: str
    task_kind: str
    episodes: list[EpisodeSummary]
    payloads: list[PayloadRef]  # one for each of `episodes`
    advantages: list[list[float] | None]
    """One value for each of `episodes`, or one for each turn, or None to keep it out of the gradient. Empty until all
    groups of the step are known, if the advantage depends on them."""
    num_bytes: int
    frozen: dict[str, list[object]] = field(default_factory=dict)
    """What a frozen model is to the group (see `roles`) -> handles to its log-probabilities, one for each episode."""
    values: list[object] | None = None
    """Handles to the critic's values, one for each episode; None without a critic, or before it was asked."""
    baseline: float | None = None
    """Reward of the greedy episode, if the advantage needs one."""
    log_ratios: list[float] = field(default_factory=list)  # log(policy / reference) of each episode before the update
    num_images: int = 0
    pictures: PayloadRef | None = None  # as in PlayedGroup

    @property
    def stored(self) -> list[PayloadRef]:
        """Everything that was put aside when it was played."""
        return self.payloads if self.pictures is None else [*self.payloads, self.pictures]

    @property
    def oldest_version(self) -> int:
        return min(episode.oldest_version for episode in self.episodes)

    @property
    def newest_version(self) -> int:
        return max(episode.newest_version for episode in self.episodes)

    @property
    def num_tokens(self) -> int:
        """The most tokens that go through the model: the prompt once, and what samples of an episode share."""
        prompt = max(episode.num_prompt_tokens for episode in self.episodes)
        return prompt + sum(episode.num_completion_tokens for episode in self.episodes)


@dataclass(kw_only=True, slots=True)
class CriticTargets:
    """What a critic learns from one sample."""

    values: FloatArray  # [L], its own before the update
    returns: FloatArray  # [L]


class Likely(NamedTuple):
    """The tokens that a teacher finds likeliest in the place of each loss token."""

    tokens: Support
    logprobs: FloatArray  # [K], among all tokens


@dataclass(kw_only=True, slots=True)
class TrainSample:
    """A Sample with what the trainer adds to it. Example: the sample above with advantage 0.58."""

    sample: Sample
    advantage: float | FloatArray
    """One value for every token, or [L]."""
    frozen_logprobs: dict[str, FloatArray] = field(default_factory=dict)  # [L], by what a frozen model is to it
    likely: Likely | None = None
    critic: CriticTargets | None = None
    pictures: Pictures = field(default_factory=dict)  # the images of its group
