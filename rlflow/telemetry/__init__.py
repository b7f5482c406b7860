"""What a person sees of a run: metrics, console, samples, trace, trackers, report.

Nothing here imports torch, vLLM or Ray: the driver process loads it.
"""
