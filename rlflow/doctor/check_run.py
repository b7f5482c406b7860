"""Judges whether the model, the environment and the GPUs are what a run needs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlflow.config import Config
from rlflow.doctor.facts import MachineFacts, ModelReport, ModelSize, Problem, RayFacts, Tried
from rlflow.doctor.findings import Finding, error, of_config_error, ok, warning


def check_run(config: Config, facts: MachineFacts, tried: Tried) -> list[Finding]:
    """Findings about the settings of a run."""
    findings = check_placement(tried.ray.placed, tried.ray.misfit) if isinstance(tried.ray, RayFacts) else []
    findings += [*_model(config.model.path, tried, facts.environment)]
    if config.reward.model is not None:
        findings += [*_reward_model(config.reward.model, tried.reward_model, facts.environment)]
    if isinstance(tried.engine, Problem):
        findings.append(_problem("engine", tried.engine))
    if isinstance(tried.environment, Problem):
        findings.append(_problem("tasks", tried.environment))
    else:
        findings.append(ok("tasks", f"env.name={config.env.name} and its reward load"))
    return findings


def check_placement(placed: Sequence[str], misfit: str) -> list[Finding]:
    """`placed` is a line for each machine that something of the run would be on."""
    return [of_config_error("placement", misfit)] if misfit else [ok("placement", line) for line in placed]


def check_address(config: Config, environment: Mapping[str, str]) -> list[Finding]:
    """A variable that Ray follows and a run does not."""
    address = environment.get("RAY_ADDRESS")
    if not address or config.cluster.address is not None:
        return []
    return [
        warning(
            "environment",
            f"RAY_ADDRESS={address} has no effect: with cluster.address=null a run starts its own Ray",
            "set cluster=ray to join that cluster, or unset RAY_ADDRESS",
        )
    ]


def _model(path: str, tried: Tried, environment: Mapping[str, str]) -> Iterator[Finding]:
    model, size = tried.model, tried.size
    if isinstance(size, Problem) and not size.is_absent:
        yield _problem("model", size)
    if isinstance(model, Problem):
        if model.is_absent:
            yield _absent("model", path, environment)
        elif model != size:  # where config.json is missing, both say so
            yield _problem("model", model)
    elif model is not None:
        parameters = f"{size.num_parameters:,} parameters, " if isinstance(size, ModelSize) else ""
        yield ok("model", f"{path}: {parameters}{model.folder}")
        yield from _template(model)


def _template(model: ModelReport) -> Iterator[Finding]:
    forks = [name for name, num_forks, _ in model.template if num_forks]
    refused = {name: text for name, _, text in model.template if text}
    if refused.get("plain"):
        yield of_config_error("chat template", refused["plain"])
    elif forks:
        yield warning(
            "chat template",
            f"it rewrites earlier replies ({', '.join(forks)}), so that each turn becomes a sample of its own",
            "for environments of several turns, take a template that keeps them (chat_template.jinja)",
        )
    else:
        yield ok("chat template", _takes(model, refused))


def _takes(model: ModelReport, refused: Mapping[str, str]) -> str:
    kept = [name for name, _, _ in model.template if name not in refused]
    not_taken = f"; it takes no conversations with {', '.join(refused)}" if refused else ""
    return f"keeps what was sampled: {', '.join(kept)}{not_taken}"


def _reward_model(path: str, problem: Problem | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    if problem is None:
        yield ok("reward model", path)
    elif problem.is_absent:
        yield _absent("reward model", path, environment)
    else:
        yield _problem("reward model", problem)


def _absent(name: str, path: str, environment: Mapping[str, str]) -> Finding:
    if environment.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return error(
            name,
            f"{path} is not in the hub's cache, and HF_HUB_OFFLINE forbids to download it",
            f"unset HF_HUB_OFFLINE, or bring it: hf download {path}",
        )
    return warning(name, f"{path} is not in the hub's cache: a run downloads it first", f"hf download {path}")


def _problem(name: str, problem: Problem) -> Finding:
    if problem.is_setting:
        return of_config_error(name, problem.text)
    return error(
        name, problem.text, f"`rlflow train` with RLFLOW_TRACEBACK=1 shows where; {name} comes from the settings"
    )
