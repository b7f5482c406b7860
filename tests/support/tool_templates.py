"""Chat templates of the families that write tool calls in a syntax of their own, and tokenizers for them.

TRL carries the templates of many families. The others get a small one here, in the syntax that their makers document.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlflow.models.resolve import resolve_model


@dataclass(kw_only=True, slots=True, frozen=True)
class Family:
    """How one family writes calls."""

    parser: str | None
    """vLLM's name of the parser; None if tools are described as text."""
    template: str = ""
    """A template that TRL carries; "" for one of ours."""
    calls: str = ""
    """Ours: what stands in the place of a message's calls, `m` being the message."""
    special: str = ""
    """Special tokens, with spaces between them."""
    tokens: str = ""
    """Tokens that are not special, in the same way."""


_CHATML = "<|im_start|> <|im_end|>"
_TAGS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
_ARGUMENTS = "<arg_key> </arg_key> <arg_value> </arg_value>"
_GEMMA = '<|turn> <turn|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|> <|channel> <channel|>'
_DEEPSEEK = " ".join(
    f"<\uff5ctool▁{name}\uff5c>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
_LLAMA = "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|python_tag|>"
_HARMONY = "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|return|> <|call|>"
_KIMI = (
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|> "
    "<|tool_call_argument_begin|>"
)


_BETWEEN = "{{{{ {0!r} if not loop.last }}}}"


def _each(text: str, between: str = "") -> str:
    """`text` for each call, with its name, its arguments as JSON (json) and as text (text), and its id."""
    named = text.replace("NAME", "{{ c.function.name }}").replace("JSON", "{{ c.function.arguments | tojson }}")
    named = named.replace("TEXT", "{{ '' + c.function.arguments }}").replace("ID", "{{ c.id }}")
    return "{% for c in m.tool_calls %}" + named + _BETWEEN.format(between) + "{% endfor %}"


def _fields(text: str, between: str = "") -> str:
    """`text` for each argument of a call, with its key and its value: text as it is, anything else as JSON."""
    value = "{{ value if value is string else value | tojson }}"
    named = text.replace("KEY", "{{ key }}").replace("VALUE", value).replace("LITERAL", "{{ value | tojson }}")
    return "{% for key, value in c.function.arguments.items() %}" + named + _BETWEEN.format(between) + "{% endfor %}"


_OBJECT = '{"name": "NAME", "arguments": JSON}'

FAMILIES = {
    "SmolLM2": Family(parser=None, template="smollm2"),
    "Qwen2.5": Family(parser="hermes", template="qwen2_5", special=_CHATML, tokens=_TAGS),
    "Qwen3": Family(parser="hermes", template="qwen3", special=_CHATML, tokens=_TAGS),
    "Qwen3-2507": Family(parser="hermes", template="qwen3_instruct_2507", special=_CHATML, tokens=_TAGS),
    "Qwen3.5": Family(parser="qwen3_coder", template="qwen3_5_think", special=_CHATML, tokens=_TAGS),
    "Qwen3.5, no thoughts": Family(parser="qwen3_coder", template="qwen3_5_nothink", special=_CHATML, tokens=_TAGS),
    "Nemotron-3": Family(parser="qwen3_coder", template="nemotron_3_nano", special=_CHATML, tokens=_TAGS),
    "Llama-3": Family(parser=None, template="llama3", special=_LLAMA),
    "Llama-3.1": Family(parser="llama3_json", template="llama3_1", special=_LLAMA),
    "Llama-3.2": Family(parser="llama3_json", template="llama3_2", special=_LLAMA),
    "GLM-4.5": Family(
        parser="glm45",
        template="glm4moe",
        special="<|user|> <|assistant|> <|observation|> <|system|>",
        tokens=f"{_TAGS} {_ARGUMENTS}",
    ),
    "gpt-oss": Family(parser="openai", template="gptoss", special=_HARMONY),
    "Gemma-3": Family(parser=None, template="gemma3", special="<bos> <start_of_turn> <end_of_turn>"),
    "Gemma-4": Family(parser="gemma4", template="gemma4", special=_GEMMA),
    "LFM2": Family(
        parser="lfm2",
        template="lfm2_v2",
        special=f"{_CHATML} <|tool_call_start|> <|tool_call_end|> <|tool_response_start|> <|tool_response_end|>",
    ),
    "Muse-Glimmer": Family(
        parser="muse_glimmer", template="muse_glimmer", special="<|start|> <|message|> <|eot|> <|eom|>"
    ),
    "Phi-3": Family(parser=None, template="phi3", special="<|system|> <|user|> <|assistant|> <|end|> <|endoftext|>"),
    "Phi-3.5": Family(
        parser=None, template="phi3_5", special="<|system|> <|user|> <|assistant|> <|end|> <|endoftext|>"
    ),
    "DeepSeek-V3": Family(
        parser="deepseek_v3",
        calls="<\uff5ctool▁calls▁begin\uff5c>"
        + _each(
            "<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>NAME\n```json\nTEXT\n```<\uff5ctool▁call▁end\uff5c>",
            "\n",
        )
        + "<\uff5ctool▁calls▁end\uff5c>",
        tokens=_DEEPSEEK,
    ),
    "DeepSeek-V3.1": Family(
        parser="deepseek_v31",
        calls="<\uff5ctool▁calls▁begin\uff5c>"
        + _each("<\uff5ctool▁call▁begin\uff5c>NAME<\uff5ctool▁sep\uff5c>TEXT<\uff5ctool▁call▁end\uff5c>")
        + "<\uff5ctool▁calls▁end\uff5c>",
        tokens=_DEEPSEEK,
    ),
    "Hermes": Family(parser="hermes", calls=_each(f"<tool_call>\n{_OBJECT}\n</tool_call>", "\n"), special=_TAGS),
    "Mistral": Family(
        parser="mistral", calls=_each("[TOOL_CALLS]NAME[ARGS]JSON"), special="[TOOL_CALLS] [ARGS] [THINK] [/THINK]"
    ),
    "Mistral-7B-v0.3": Family(
        parser="mistral", calls="[TOOL_CALLS] [" + _each(_OBJECT, ", ") + "]", special="[TOOL_CALLS]"
    ),
    "Kimi-K2": Family(
        parser="kimi_k2",
        calls="<|tool_calls_section_begin|>"
        + _each("<|tool_call_begin|>ID<|tool_call_argument_begin|>JSON<|tool_call_end|>")
        + "<|tool_calls_section_end|>",
        special=_KIMI,
    ),
    "MiniMax-M2": Family(
        parser="minimax_m2",
        calls="<minimax:tool_call>\n"
        + _each('<invoke name="NAME">\n' + _fields('<parameter name="KEY">VALUE</parameter>\n') + "</invoke>\n")
        + "</minimax:tool_call>",
        tokens="<minimax:tool_call> </minimax:tool_call>",
    ),
    "Seed-OSS": Family(
        parser="seed_oss",
        calls=_each(
            "<seed:tool_call>\n<function=NAME>\n"
            + _fields("<parameter=KEY>VALUE</parameter>\n")
            + "</function>\n</seed:tool_call>",
            "\n",
        ),
        tokens="<seed:tool_call> </seed:tool_call> <seed:think> </seed:think>",
    ),
    "Granite-3": Family(parser="granite", calls="<|tool_call|>[" + _each(_OBJECT, ", ") + "]", special="<|tool_call|>"),
    "Phi-4-mini": Family(parser="phi4_mini_json", calls="functools[" + _each(_OBJECT, ", ") + "]"),
    "Llama-4": Family(
        parser="llama4_pythonic",
        calls="<|python_start|>[" + _each("NAME(" + _fields("KEY=LITERAL", ", ") + ")", ", ") + "]<|python_end|>",
        special="<|python_start|> <|python_end|>",
    ),
    "Olmo-3": Family(
        parser="olmo3",
        calls="<function_calls>" + _each("NAME(" + _fields("KEY=LITERAL", ", ") + ")", "\n") + "</function_calls>",
    ),
    "pythonic": Family(parser="pythonic", calls="[" + _each("NAME(" + _fields("KEY=LITERAL", ", ") + ")", ", ") + "]"),
    "LongCat": Family(
        parser="longcat",
        calls=_each(f"<longcat_tool_call>{_OBJECT}</longcat_tool_call>"),
        tokens="<longcat_tool_call> </longcat_tool_call>",
    ),
    "Jamba": Family(
        parser="jamba",
        calls="<tool_calls>[\n" + _each(_OBJECT, ",\n") + "\n]</tool_calls>",
        tokens="<tool_calls> </tool_calls>",
    ),
    "FunctionGemma": Family(
        parser="functiongemma",
        calls=_each(
            "<start_function_call>call:NAME{{ '{' }}"
            + _fields("KEY:<escape>VALUE<escape>", ",")
            + "}<end_function_call>"
        ),
        tokens="<start_function_call> <end_function_call> <escape>",
    ),
}
SHIPPED = [name for name, family in FAMILIES.items() if family.template]
OWN_SYNTAX = [name for name, family in FAMILIES.items() if family.parser is not None]


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """A real BPE tokenizer with the family's tokens and template."""
    family = FAMILIES[name]
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))
    tokenizer.add_special_tokens({"additional_special_tokens": [*family.special.split(), *_CHATML.split()]})
    tokenizer.add_tokens(family.tokens.split())
    if family.calls:
        tokenizer.chat_template = (
            "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
            "<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
            + family.calls
            + "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
    elif name != "SmolLM2":
        spec = importlib.util.find_spec("trl")
        if spec is None or spec.origin is None:
            pytest.skip("needs the templates that TRL carries")
        path = Path(spec.origin).parent / "chat_templates" / f"{family.template}.jinja"
        tokenizer.chat_template = path.read_text()
    return tokenizer
