"""All findings about one machine. Pure."""

from __future__ import annotations

from rlflow.config import Config
from rlflow.doctor.check_machine import check_machine
from rlflow.doctor.check_run import check_address, check_run
from rlflow.doctor.check_software import check_software
from rlflow.doctor.facts import Seen
from rlflow.doctor.findings import Finding
from rlflow.doctor.needs import Needs

HERE = "this machine"


def judge(config: Config, seen: Seen, needs: Needs, *, is_run: bool, computes: bool) -> list[Finding]:
    """Software, machine and, where `is_run`, the run; `computes`: whether engines or trainers may be here."""
    findings = check_software(seen.facts, seen.tried, needs)
    findings += check_machine(seen.facts, needs, computes=computes)
    findings += check_address(config, seen.facts.environment)
    return [*findings, *check_run(config, seen.facts, seen.tried)] if is_run else findings
