"""An episode whose replies are given: nothing is sampled, and no environment is asked.

    one of Task.demonstrations -> Chat, which records each reply as a turn of the policy -> PlayedEpisode

No policy of this run has sampled these tokens, so their version is NO_VERSION: they are never too old, and nobody's
log-probabilities are compared with the trainer's. What stands between two replies is context, as in every episode.
"""

from typing import cast

from rlflow.errors import NoReply
from rlflow.rollout.chat import Chat
from rlflow.rollout.episode import PlayedEpisode, recorded
from rlflow.types import EpisodeEnd, Json, Message, Task


async def show(task: Task, place: int, chat: Chat) -> PlayedEpisode:
    """The episode in this place of the group of a task that has demonstrations; tools are those of its column `tools`.

    Its reward is the weight of the row. Of several, the first one has that, and the others 0.
    """
    tools = cast(list[dict[str, Json]], task.data.get("tools") or [])
    prompt = await chat.taken_up(task.prompt)
    told: list[Message] = []
    try:
        for message in await chat.taken_up(task.demonstrations[place]):
            if message["role"] == "assistant":
                reply = await chat.reply([*prompt, *told], tools, given=message)
                message = reply.message  # with the calls as they are found in its tokens
            told.append(message)
    except NoReply:
        is_empty = chat.end is EpisodeEnd.EMPTY_COMPLETION
        end = EpisodeEnd.EMPTY_COMPLETION if is_empty else EpisodeEnd.PROMPT_TOO_LONG
        return recorded(chat, task, prompt, told, end, chat.end_detail)
    weight = task.data.get("weight")
    reward = 0.0 if place else 1.0 if weight is None else float(cast(float, weight))
    return recorded(chat, task, prompt, told, EpisodeEnd.COMPLETED, reward=reward)
