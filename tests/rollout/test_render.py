"""Messages <-> tokens with real chat templates on a byte-level tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlflow.errors import ConfigError, TemplateRefused
from rlflow.rollout.render import Renderer
from rlflow.types import FunctionCall, Message, ToolCall

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS_THOUGHTS = CHATML.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
)
THINKS = """
{%- for m in messages %}
    {%- set text = m.content if preserve_thinking or loop.last else m.content.split('</think>')[-1].lstrip() %}
    {{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
"""As Qwen3's: thoughts of earlier replies go, and replies without thoughts begin with empty ones."""
ONLY_USERS = "{% if messages[-1].role != 'user' %}{{ raise_exception('users only') }}{% endif %}"


def build(template: str | None) -> PreTrainedTokenizerFast:
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


TOKENIZER = build(CHATML)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


(START,), (END,) = ids_of("<|im_start|>"), ids_of("<|im_end|>")


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def test_a_prompt_ends_where_the_reply_starts() -> None:
    ids = Renderer(TOKENIZER).prompt([user("2+2")])
    assert ids == [START, *ids_of("user\n2+2"), END, *ids_of("\n"), START, *ids_of("assistant\n")]


def test_a_reply_is_parsed_without_special_tokens() -> None:
    assert Renderer(TOKENIZER).parse([*ids_of("é = 4 "), END]) == "é = 4 "


def test_a_given_reply_has_the_tokens_of_a_sampled_one() -> None:
    renderer = Renderer(TOKENIZER)
    assert renderer.given([user("2+2")], assistant("4")) == [*ids_of("4"), END]
    talk = [user("2+2"), assistant("4"), user("no")]
    assert renderer.given(talk, assistant("<|im_end|> 5")) == [END]  # what ends a turn ends it wherever it stands


def test_a_given_reply_may_think_where_the_template_begins_with_empty_thoughts() -> None:
    renderer = Renderer(build(THINKS), {"enable_thinking": False})
    assert renderer.given([user("2+2")], assistant("4")) == [*ids_of("4"), END]


BEGINS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""As templates of models that always think: the prompt holds the beginning of the reply."""


def test_a_given_reply_goes_on_where_the_template_has_begun_it() -> None:
    renderer = Renderer(build(BEGINS))
    thought = assistant("<think>\nhm</think>4")
    assert renderer.given([user("2+2")], thought) == [*ids_of("hm</think>4"), END]
    call = ToolCall(id="1", type="function", function=FunctionCall(name="add", arguments="{}"))
    with pytest.raises(TemplateRefused, match="and this one has tool calls"):
        renderer.given([user("2+2")], Message(role="assistant", content="", tool_calls=[call]))


def test_the_next_prompt_keeps_the_sampled_tokens() -> None:
    renderer = Renderer(TOKENIZER)
    held = [*renderer.prompt([user("2+2")]), *ids_of("4"), END]
    added = renderer.extend(held, [user("2+2"), assistant("4")], [user("no")])
    assert added == [*ids_of("\n"), START, *ids_of("user\nno"), END, *ids_of("\n"), START, *ids_of("assistant\n")]


def test_a_reply_without_an_end_of_turn_gets_the_template_s() -> None:
    renderer = Renderer(TOKENIZER)
    held = [*renderer.prompt([user("2+2")]), *ids_of("4")]
    added = renderer.extend(held, [user("2+2"), assistant("4")], [user("no")])
    assert added is not None
    assert added[:3] == [END, *ids_of("\n"), START]


def test_a_character_cut_in_half_still_extends() -> None:
    renderer = Renderer(TOKENIZER)
    reply = ids_of("é")[:1]
    held = [*renderer.prompt([user("x")]), *reply]
    added = renderer.extend(held, [user("x"), assistant(renderer.parse(reply))], [user("y")])
    assert added is not None
    assert added[0] == END


def test_a_template_that_rewrites_history_breaks_the_prefix() -> None:
    renderer = Renderer(build(FORGETS_THOUGHTS))
    reply = "hm</think>4"
    held = [*renderer.prompt([user("2+2")]), *ids_of(reply), END]
    assert renderer.extend(held, [user("2+2"), assistant(reply)], [user("no")]) is None


def test_a_special_token_within_a_reply_breaks_the_prefix() -> None:
    renderer = Renderer(TOKENIZER)
    reply = [*ids_of("4"), START, END]
    held = [*renderer.prompt([user("2+2")]), *reply]
    assert renderer.extend(held, [user("2+2"), assistant(renderer.parse(reply))], [user("no")]) is None


def test_a_model_without_a_chat_template_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer has no chat template.*use an instruction-tuned model"):
        Renderer(build(None))


def test_the_template_reads_what_the_settings_say() -> None:
    for template_args, end in (
        ({}, "assistant\n"),
        ({"enable_thinking": True}, "assistant\n"),
        ({"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
    ):
        prompt = Renderer(build(THINKS), template_args).prompt([user("2+2")])
        assert TOKENIZER.decode(prompt) == f"<|im_start|>user\n2+2<|im_end|>\n<|im_start|>{end}"


def test_template_args_keep_the_prefix_only_where_the_template_does() -> None:
    """Empty thoughts that stand before the reply are dropped with the others: the conversation forks."""
    for template_args, reply, is_kept in (
        ({}, "<think>\nhm\n</think>\n\n4", False),
        ({}, "4", True),
        ({"enable_thinking": False}, "4", False),
        ({"preserve_thinking": True}, "<think>\nhm\n</think>\n\n4", True),
    ):
        renderer = Renderer(build(THINKS), template_args)
        held = [*renderer.prompt([user("2+2")]), *ids_of(reply), END]
        so_far = [user("2+2"), assistant(reply)]
        added = renderer.extend(held, so_far, [user("no")])
        assert (added is not None) is is_kept
        if added is not None:
            assert held + added == renderer.prompt([*so_far, user("no")])


@pytest.mark.parametrize(
    "name",
    ["colour", "loop", "text", "messages", "add_generation_prompt", "tools", "tokenize", "eos_token", "strftime_now"],
)
def test_a_template_argument_without_effect_is_refused(name: str) -> None:
    """What nobody reads, what the template sets, and what it is given anyway."""
    template = THINKS + "{{ strftime_now('%Y') }}{{ eos_token }}{{ tools }}{{ tokenize }}"
    with pytest.raises(
        ConfigError,
        match=rf"rollout\.template_args\.{name} has no effect: beside what it is always given, the model's chat "
        "template reads enable_thinking, preserve_thinking; leave it out",
    ):
        Renderer(build(template), {name: False})


def test_a_template_argument_with_a_wrong_name_gets_the_right_one() -> None:
    with pytest.raises(ConfigError, match="did you mean enable_thinking"):
        Renderer(build(THINKS), {"enable_thinkin": False})
    with pytest.raises(ConfigError, match="chat template reads nothing; leave it out"):
        Renderer(TOKENIZER, {"enable_thinking": False})


def test_a_conversation_that_the_template_refuses_is_named() -> None:
    with pytest.raises(ConfigError, match="refused a conversation with the roles user, assistant: users only"):
        Renderer(build(ONLY_USERS)).prompt([user("x"), assistant("y")])


def test_halves_of_characters_are_no_reason_to_fail() -> None:
    whole, half = "\ud83d\ude00", "\ud83d"
    renderer = Renderer(TOKENIZER)
    assert renderer.parse(renderer.prompt([user(whole + half)])) == "user\n\U0001f600\ufffd\nassistant\n"


@given(texts=st.lists(st.text(max_size=12), min_size=3, max_size=3), is_ended=st.booleans())
def test_an_extended_prompt_reads_as_the_whole_conversation(texts: list[str], is_ended: bool) -> None:
    renderer = Renderer(TOKENIZER)
    question, reply_text, answer = (text.encode(errors="replace").decode() for text in texts)
    reply = [*ids_of(reply_text), *([END] if is_ended else [])]
    held = [*renderer.prompt([user(question)]), *reply]
    so_far = [user(question), assistant(renderer.parse(reply))]
    added = renderer.extend(held, so_far, [user(answer)])
    assert added is not None
    assert TOKENIZER.decode(held + added) == TOKENIZER.decode(renderer.prompt([*so_far, user(answer)]))


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, [END, END, START]),
        (CHATML.replace("<|im_end|>", " <|im_end|>"), [END, END, START]),
        # The next turn ends the reply.
        (CHATML.replace("<|im_end|>\n", ""), [START]),
        (CHATML.replace("<|im_start|>", "").replace("<|im_end|>", ""), []),
        (ONLY_USERS + CHATML, [END, START]),
    ],
    ids=["chatml", "after a space", "open", "no special tokens", "refuses"],
)
def test_what_ends_a_reply(template: str, ends: list[int]) -> None:
    assert Renderer(build(template)).ends() == ends
