"""`rlflow doctor`: is this machine, or every node of a cluster, fit for a run?

    probes (machine, packages, libraries, nodes) -> facts -> checks -> findings

Probes look and judge nothing; checks are pure functions of facts and of what a run needs.
"""
