"""`rlflow doctor`: is this machine, or every node of a cluster, fit for a run?

    Here (what the machine is), Needs (what the run needs) -> checks -> findings

A check is one function, which runs where it looks: beside the command, in a process that can be killed (what loads
libraries), or on a node of the cluster. What travels is a finding.
"""
