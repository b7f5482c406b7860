"""Tool calls of each family: message -> the template's text -> tokens -> message, with the parsers that a run uses."""

import json
import re
import subprocess
import sys
import textwrap
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
from letters import limits
from tool_templates import FAMILIES, OWN_SYNTAX, tokenizer_of

from rlflow.errors import EnvironmentFailure
from rlflow.rollout.chat import Chat
from rlflow.rollout.render import Renderer
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.rollout.tool_calls import arguments_of
from rlflow.tools.env.check import sampled_ids
from rlflow.types import FunctionCall, Json, Message, ToolCall

NOTE: dict[str, Json] = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Notes something.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "What."},
                "times": {"type": "integer", "description": "How often."},
                "loud": {"type": "boolean", "description": "Whether aloud."},
            },
        },
    },
}
USER = Message(role="user", content="x")


tokenizers = cache(tokenizer_of)


@cache
def renderer_of(family: str) -> Renderer:
    return Renderer(tokenizers(family))


def written_by(family: str, *calls: FunctionCall) -> list[int]:
    """The tokens that the family's template writes for a reply with these calls, without the end of the turn."""
    named = [ToolCall(id=f"call0000{index}", type="function", function=call) for index, call in enumerate(calls)]
    return renderer_of(family).given([USER], Message(role="assistant", content="", tool_calls=named), [NOTE])


def note(**arguments: Json) -> FunctionCall:
    return FunctionCall(name="note", arguments=json.dumps(arguments))


def read_back(family: str, ids: list[int]) -> list[tuple[str, object]]:
    renderer = renderer_of(family)
    calls = renderer.calls(renderer.parse(ids), [NOTE])
    return [(call["name"], arguments_of(call)) for call in calls]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_says_which_parser_reads_it(family: str) -> None:
    support = renderer_of(family).tool_support
    assert (support.syntax.parser if support.syntax else None) == FAMILIES[family].parser
    assert bool(support.reason) is (support.syntax is None)


CALLS = {
    "typed": note(text="7", times=7, loud=True),
    "quoted": note(text='She said: "no"; it\'s über.', times=1, loud=False),
    "lines": note(text="one\ntwo", times=-1, loud=False),
}
"""The text 7 and the number 7 differ only by the schema where a syntax writes both without quotes."""
GUESS = ("FunctionGemma", "Muse-Glimmer")
"""Their parsers do not ask the schema, and take each text that spells a number to be one."""
ONE_CALL = ("Llama-3.1", "Llama-3.2", "gpt-oss")
"""Their templates write one call a reply."""
WRITABLE = [family for family in OWN_SYNTAX if family != "Nemotron-3"]
"""Not those whose template begins each reply itself, so that a given one cannot be taken out of it."""


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("family", WRITABLE)
def test_a_call_is_read_back_as_it_was_written(family: str, kind: str) -> None:
    expected = arguments_of(CALLS[kind])
    if family in GUESS and kind == "typed":
        expected["text"] = 7
    assert read_back(family, written_by(family, CALLS[kind])) == [("note", expected)]


@pytest.mark.parametrize("family", [family for family in WRITABLE if family not in ONE_CALL])
def test_the_calls_of_a_reply_keep_their_order(family: str) -> None:
    ids = written_by(family, note(text="a", times=1), note(text="b", times=2))
    assert read_back(family, ids) == [("note", {"text": "a", "times": 1}), ("note", {"text": "b", "times": 2})]


@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.parametrize("family", WRITABLE)
def test_half_a_call_is_a_call_without_a_name(family: str, share: float) -> None:
    renderer = renderer_of(family)
    syntax = renderer.tool_support.syntax
    assert syntax is not None
    text = renderer.parse(written_by(family, note(text="a b", times=12)))
    if family == "gpt-oss":
        text = '<|channel|>commentary to=functions.note <|constrain|>json<|message|>{"text": "a b", "times": 12}'
    begun = syntax.opening.search(text)
    assert begun is not None
    half = text[: begun.end() + int(share * (len(text) - begun.end()))]
    (call,) = renderer.calls(half, [NOTE])
    assert call["name"] == "" and (call["arguments"] in half or half.strip().endswith(call["arguments"]))
    assert renderer.calls("nothing to do with tools", [NOTE]) == []


def test_a_broken_call_leaves_the_one_beside_it() -> None:
    good = "<tool_call>\n<function=note>\n<parameter=times>\n2\n</parameter>\n</function>\n</tool_call>"
    renderer = renderer_of("Qwen3.5")
    assert renderer.calls(f"</think>\n<tool_call>\n{{?}}\n</tool_call>\n{good}", [NOTE]) == [
        {"name": "", "arguments": "<tool_call>\n{?}\n</tool_call>"},
        {"name": "note", "arguments": '{"times": 2}'},
    ]


@pytest.mark.parametrize(
    ("family", "text", "names"),
    [
        ("Qwen3", '<think><tool_call>{"name": "f"}</tool_call>?</think>no', []),
        ("Qwen3", '<think>?</think><tool_call>{"name": "f"}</tool_call>', ["f"]),
        ("Qwen3", '<tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call>', ["f"]),
        ("Qwen3", '<think><tool_call>{"name": "f"}</tool_call>', ["f"]),  # thoughts that do not end
        ("Qwen3.5", "<tool_call>\n<function=f>\n</function>\n</tool_call>?</think>no", []),  # begun by the template
        ("Mistral", "[THINK][TOOL_CALLS]f[ARGS]{}[/THINK]no", []),
        ("Gemma-4", '<|channel>thought\n<|tool_call>call:note{text:<|"|>a<|"|>}<tool_call|>?<channel|>Done: 42', []),
        ("Gemma-4", '<|channel>thought\n?<channel|><|tool_call>call:note{text:<|"|>a<|"|>}<tool_call|>', ["note"]),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>to=functions.f<|end|><|start|>assistant<|channel|>final<|message|>",
            [],
        ),
        ("gpt-oss", "<|channel|>commentary to=f<|message|>{}<|call|>", ["f"]),
    ],
)
def test_calls_within_thoughts_are_none(family: str, text: str, names: list[str]) -> None:
    assert [call["name"] for call in renderer_of(family).calls(text, [NOTE])] == names


ARGUMENT_ENDS = {
    "GLM-4.5": ["</arg_key>", "</arg_value>"],
    "Qwen3.5": ["</parameter>"],
    "Seed-OSS": ["</parameter>"],
    "MiniMax-M2": ["</parameter>"],
    "Muse-Glimmer": ["</atem:parameter>"],
    "FunctionGemma": ["<escape>"],
    "Gemma-4": ['<|"|>'],
}
"""Families that mark where an argument ends, in some by what begins it."""


@pytest.mark.parametrize(("family", "end"), [(family, end) for family, ends in ARGUMENT_ENDS.items() for end in ends])
def test_a_call_with_an_open_argument_is_a_call_without_a_name(family: str, end: str) -> None:
    renderer = renderer_of(family)
    text = renderer.parse(written_by(family, note(text="a b", path="p")))
    for found in re.finditer(re.escape(end), text):
        (call,) = renderer.calls(text[: found.start()] + text[found.end() :], [NOTE])
        assert call["name"] == "", found


MARKUP = {
    "GLM-4.5": ["<tool_call>", "<tool_call>f"],
    "Qwen3.5": ["<tool_call>", "<function=f>", "<tool_call>\n<function=f>"],
    "Seed-OSS": ["<seed:tool_call>", "<function=f>"],
    "MiniMax-M2": ["<minimax:tool_call>", '<invoke name="f">'],
    "FunctionGemma": ["<start_function_call>"],
    "Gemma-4": ["<|tool_call>"],
}
"""What begins a call."""


@pytest.mark.parametrize(("family", "mark"), [(family, mark) for family, marks in MARKUP.items() for mark in marks])
def test_what_begins_a_call_begins_none_inside_an_argument(family: str, mark: str) -> None:
    """A parser of vLLM may not read such an argument; then the call has no name."""
    call = note(text=f"a {mark} b", times=1)
    ids = written_by(family, call)
    assert read_back(family, ids) == [("note", arguments_of(call))]


@pytest.mark.parametrize(("family", "end"), [("Qwen3.5", "</function>"), ("Seed-OSS", "</function>")])
def test_an_argument_that_ends_its_call_too_early_is_not_left_out(family: str, end: str) -> None:
    call = note(text=f"a {end} b", times=1)
    ((name, arguments),) = read_back(family, written_by(family, call))
    assert name == "" or arguments == arguments_of(call)


def test_the_second_call_of_a_list_is_not_left_out() -> None:
    text = '<|tool_call|>[{"name": "note", "arguments": {"text": [1]}}, {"name":'
    assert renderer_of("Granite-3").calls(text, [NOTE]) == [{"name": "", "arguments": text}]


KEPT = [family for family in WRITABLE if family not in ("gpt-oss", "Qwen3")]


@pytest.mark.parametrize("family", [*KEPT, "gpt-oss"])
async def test_a_conversation_goes_on_with_the_sampled_tokens(family: str) -> None:
    """gpt-oss: its template writes a call otherwise than the model does, so that the episode forks."""
    renderer, asked = renderer_of(family), list[GenerateRequest]()
    call = note(text="a", times=1)
    sampled = [*written_by(family, call)]
    if family == "gpt-oss":
        header = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.note "
        text = f"{header}<|constrain|>json<|message|>{call['arguments']}<|call|>"
        sampled = tokenizers(family).encode(text, add_special_tokens=False)

    async def generate(request: GenerateRequest) -> Completion:
        asked.append(request)
        zeros = [0] * len(sampled)
        return Completion(
            ids=sampled, logprobs=[0.0] * len(sampled), versions=zeros, cache_versions=zeros, finish_reason="stop"
        )

    chat = Chat(generate, renderer, limits())
    reply = await chat.reply([USER], [NOTE])
    (found,) = reply.message.get("tool_calls", [])
    assert arguments_of(found["function"]) == {"text": "a", "times": 1}
    answer = Message(role="tool", content="noted", tool_call_id=found["id"], name="note")
    await chat.reply([USER, reply.message, answer], [NOTE])
    held = asked[0].prompt_ids + sampled
    assert chat.num_forks == (family == "gpt-oss")
    assert (asked[1].prompt_ids[: len(held)] == held) is (family != "gpt-oss")
    shown = tokenizers(family).decode(asked[1].prompt_ids)
    assert "noted" in shown and shown.count("hm") == (family == "gpt-oss")


def test_the_answer_of_a_tool_names_the_call_as_kimi_does() -> None:
    tokenizer = tokenizer_of("Kimi-K2")
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}")
    renderer = Renderer(tokenizer)
    call = ToolCall(id="call_0_0", type="function", function=note(text="a"))
    talk = [USER, Message(role="assistant", content="", tool_calls=[call])]
    talk += [Message(role="tool", content="!", tool_call_id="call_0_0")]
    shown = tokenizer.decode(renderer.prompt(talk))
    assert "<|tool_call_begin|>functions.note:0<|tool_call_argument_begin|>" in shown
    assert "tool\nfunctions.note:0!" in shown and "call_0_0" not in shown


def test_vllm_is_loaded_for_tools_alone() -> None:
    script = """
        import sys
        from tool_templates import tokenizer_of
        from rlflow.rollout.render import Renderer
        renderer = Renderer(tokenizer_of("Mistral"))
        user = {"role": "user", "content": "x"}
        renderer.prompt([user, {"role": "assistant", "content": "y"}, user])
        assert renderer.calls("no call") == []
        assert renderer.calls("[TOOL_CALLS]f[ARGS]{} <tool_call>") == []
        assert "vllm" not in sys.modules
        tool = {"type": "function", "function": {"name": "f"}}
        assert renderer.calls("[TOOL_CALLS]f[ARGS]{}", [tool]) == [{"name": "f", "arguments": "{}"}]
        assert "vllm" in sys.modules
    """
    support = Path(__file__).parents[1] / "support"
    code = f"import sys; sys.path.insert(0, {str(support)!r})\n{textwrap.dedent(script)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_schema_that_vllm_refuses_costs_the_episode_and_names_the_tool() -> None:
    tool: dict[str, Json] = {"type": "function", "function": {"name": "bad", "description": ["x"]}}
    with pytest.raises(EnvironmentFailure, match=r"the tool 'bad' .*function\.description"):
        renderer_of("Mistral").calls("[TOOL_CALLS]bad[ARGS]{}", [NOTE, tool])


@pytest.mark.parametrize("family", ["Qwen2.5", "Qwen3.5", "Mistral", "Llama-3.1", "Phi-3"])
def test_a_script_calls_tools_as_the_model_does(family: str) -> None:
    renderer = renderer_of(family)
    text = '<tool_call>\n{"name": "note", "arguments": {"text": "a"}}\n</tool_call>'
    ids = sampled_ids(renderer, [USER], text, [NOTE])
    assert read_back(family, ids) == [("note", {"text": "a"})]
    assert ids[-1] == renderer.as_sampled("")[-1]
    assert renderer.parse(sampled_ids(renderer, [USER], "7", [NOTE])) == "7"


@pytest.mark.parametrize("family", OWN_SYNTAX)
def test_the_answer_to_a_broken_call_is_shown(family: str) -> None:
    renderer = renderer_of(family)
    good = renderer.probe_call()
    text = f"{good}\n{good[: len(good) // 2]}"
    functions = renderer.calls(text, [NOTE])
    calls = [ToolCall(id=f"call_0_{index}", type="function", function=each) for index, each in enumerate(functions)]
    assert any(not call["function"]["name"] for call in calls) or family == "gpt-oss"  # whose replies hold one message
    talk = [USER, Message(role="assistant", content=text, tool_calls=calls)]
    talk += [Message(role="tool", content=f"answer to {call['id']}", tool_call_id=call["id"]) for call in calls]
    shown = tokenizers(family).decode(renderer.prompt(talk, [NOTE]))
    assert all(f"answer to {call['id']}" in shown for call in calls)


@pytest.mark.parametrize("family", ["Gemma-4", "Kimi-K2", "Qwen2.5"])
def test_the_end_of_the_text_is_no_part_of_a_reply(family: str) -> None:
    """Engines stop at a model's end of text too, which is not what the template ends turns with."""
    tokenizer = deepcopy(tokenizers(family))
    tokenizer.add_special_tokens({"eos_token": "<the end>"})
    ids = tokenizer.encode("42<the end>", add_special_tokens=False)
    assert ids[-1] == tokenizer.eos_token_id
    assert Renderer(tokenizer).parse(ids) == "42"
