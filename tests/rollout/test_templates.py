"""Do the chat templates of the common families keep what was sampled? The table of docs/environments.md.

The templates are those that TRL carries; a real BPE tokenizer gets the special tokens of each family.
"""

import pytest
from tool_templates import FAMILIES, SHIPPED, tokenizer_of

from rlflow.rollout.render import Renderer
from rlflow.tools.env.template_check import check_template

KINDS = ("plain", "thoughts", "tools", "thoughts and tools")
FORKS = {
    "Qwen3": (0, 3, 0, 0),
    "Qwen3.5": (3, 3, 3, 0),
    "Qwen3.5, no thoughts": (3, 3, 0, 3),
    "Nemotron-3": (3, 3, 3, 3),
    "GLM-4.5": (3, 3, 3, 3),
    "gpt-oss": (3, 3, 0, 3),
    "Gemma-4": (0, 0, 0, 3),
    "Muse-Glimmer": (3, 3, 0, 3),
}
"""Family -> forks in the three continuations of each kind; none where no family is given."""


@pytest.mark.parametrize("family", SHIPPED)
def test_which_conversations_a_family_keeps(family: str) -> None:
    renderer = Renderer(tokenizer_of(family))
    found = {trial.name: (trial.turns, trial.forks, trial.refused) for trial in check_template(renderer)}
    kinds = KINDS[:3] if FAMILIES[family].parser == "llama3_json" else KINDS
    assert found == {kind: (4, forks, "") for kind, forks in zip(kinds, FORKS.get(family, (0,) * 4), strict=False)}
