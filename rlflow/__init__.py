"""rlflow: distributed reinforcement learning for language models.

Importing this package loads neither torch nor vLLM nor Ray; each part imports what it needs.
"""

__version__ = "0.1.0"
