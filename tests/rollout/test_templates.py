"""Do the chat templates of the common families keep what was sampled? The table of docs/environments.md.

The templates are those that TRL carries; a real BPE tokenizer gets the special tokens of each family.
"""

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlflow.models.resolve import resolve_model
from rlflow.rollout.render import Renderer
from rlflow.rollout.tool_syntax import CallStyle
from rlflow.tools.env.template_check import check_template

CHATML = ["<|im_start|>", "<|im_end|>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
GEMMA = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
PHI = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"]

FAMILIES = {
    "SmolLM2": (None, [], None),
    "Qwen2.5": ("qwen2_5", CHATML, CallStyle.TAGGED),
    "Qwen3": ("qwen3", CHATML, CallStyle.TAGGED),
    "Qwen3-2507": ("qwen3_instruct_2507", CHATML, CallStyle.TAGGED),
    "Llama-3": ("llama3", LLAMA, None),
    "Llama-3.1": ("llama3_1", LLAMA, CallStyle.BARE),
    "Llama-3.2": ("llama3_2", LLAMA, CallStyle.BARE),
    "Gemma-3": ("gemma3", GEMMA, None),
    "Phi-3": ("phi3", PHI, None),
    "Phi-3.5": ("phi3_5", PHI, None),
}
KINDS = ("plain", "thoughts", "tools", "thoughts and tools")
FORKS = {("Qwen3", "thoughts"): 3}
"""Family and kind -> forks in the three continuations; 0 where none is given."""


def tokenizer_of(family: str) -> PreTrainedTokenizerBase:
    name, special, _ = FAMILIES[family]
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))
    if name is not None:
        spec = importlib.util.find_spec("trl")
        if spec is None or spec.origin is None:
            pytest.skip("needs the templates that TRL carries")
        tokenizer.add_special_tokens({"additional_special_tokens": special})
        tokenizer.chat_template = (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_which_conversations_a_family_keeps(family: str) -> None:
    renderer = Renderer(tokenizer_of(family))
    assert renderer.style is FAMILIES[family][2]
    kinds = KINDS[:3] if renderer.style is CallStyle.BARE else KINDS
    found = {trial.name: (trial.turns, trial.forks, trial.refused) for trial in check_template(renderer)}
    assert found == {kind: (4, FORKS.get((family, kind), 0), "") for kind in kinds}
