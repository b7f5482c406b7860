"""Judges whether the model, the environment and the GPUs are what a run needs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlflow.config import Config
from rlflow.tools.doctor.facts import Fine, MachineFacts, ModelReport, ModelSize, Problem, RayFacts, Tried
from rlflow.tools.doctor.findings import Finding, error, of_config_error, ok, untried, warning
from rlflow.tools.doctor.needs import SMALLEST_WEIGHTS
from rlflow.tools.dry_run.memory import size


def check_run(config: Config, facts: MachineFacts, tried: Tried) -> list[Finding]:
    """Findings about the settings of a run."""
    findings = check_placement(tried.ray.placed, tried.ray.misfit) if isinstance(tried.ray, RayFacts) else []
    findings += [*_model(config.model.path, tried, facts)]
    if config.reward.model is not None and tried.reward_model is not None:
        findings.append(_reward_model(config.reward.model, tried.reward_model, facts))
    if isinstance(tried.engine, Problem):
        findings.append(_problem("engine", tried.engine))
    if isinstance(tried.environment, Problem):
        findings.append(_problem("tasks", tried.environment))
    elif isinstance(tried.environment, Fine):
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


def _model(path: str, tried: Tried, facts: MachineFacts) -> Iterator[Finding]:
    model, config_json = tried.model, tried.size
    if isinstance(config_json, Problem) and not config_json.is_absent:
        yield _problem("model", config_json)
    if isinstance(model, Problem):
        if model.is_absent:
            yield _absent("model", path, facts)
        elif model != config_json:  # where config.json is missing, both say so
            yield _problem("model", model)
    elif model is not None:
        parameters = f"{config_json.num_parameters:,} parameters, " if isinstance(config_json, ModelSize) else ""
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


def _reward_model(path: str, answer: Fine | Problem, facts: MachineFacts) -> Finding:
    if isinstance(answer, Fine):
        return ok("reward model", path)
    if answer.is_absent:
        return _absent("reward model", path, facts)
    return _problem("reward model", answer)


def _absent(name: str, path: str, facts: MachineFacts) -> Finding:
    folder = facts.hub_dir
    if facts.environment.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return error(
            name,
            f"{path} is not in the hub's cache, and HF_HUB_OFFLINE forbids to download it",
            f"unset HF_HUB_OFFLINE, or bring it: hf download {path}",
        )
    cure = "set HF_HOME to a folder on a file system with room"
    if folder.problem:
        return error(name, f"{path} is to be downloaded, and {folder.path} cannot be written ({folder.problem})", cure)
    room = f"{size(folder.free)} free in {folder.path}"
    if folder.free < SMALLEST_WEIGHTS:
        return error(name, f"{path} is to be downloaded: {room}", cure)
    return warning(name, f"{path} is not in the hub's cache: a run downloads it first; {room}", f"hf download {path}")


def _problem(name: str, problem: Problem) -> Finding:
    if problem.is_untried:
        return untried(name, problem)
    if problem.is_setting:
        return of_config_error(name, problem.text)
    return error(
        name, problem.text, f"`rlflow train` with RLFLOW_TRACEBACK=1 shows where; {name} comes from the settings"
    )
