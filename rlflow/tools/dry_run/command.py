"""`rlflow train ... --dry-run`: what the run would need, as plain text or as a JSON object.

Starts nothing, and reads no weights.
"""

import json
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlflow.cluster.slots import machines_of
from rlflow.config import Config, Transport
from rlflow.errors import ConfigError, first_line
from rlflow.rewards.models import model_paths
from rlflow.runtime.derived import by_device, max_running
from rlflow.settings.checks import check
from rlflow.tools.dry_run.estimate import USABLE, Estimate, estimate, smallest_gpu
from rlflow.tools.dry_run.host import too_much
from rlflow.tools.dry_run.memory import ProcessMemory, size

_TITLES = {
    "engine": "Engine, on each of its GPUs",
    "trainer": "Trainer rank, with micro-batches of up to {tokens:,} tokens",
    "critic": "Critic rank, with the same micro-batches",
    "reference": "Reference rank",
    "teacher": "Teacher rank, of the largest teacher",
    "reward_model": "Reward model, the largest, of which each replica is whole",
}
_CURES = {
    "engine": "raise rollout.tensor_parallel, or lower rollout.kv_cache_gb if it is set",
    "trainer": "raise trainer.ranks, lower trainer.micro_batch_tokens, set trainer.gradient_checkpointing=full, or "
    "raise trainer.tensor_parallel or trainer.sequence_parallel",
    "critic": "as for the trainer",
    "reference": "raise cluster.reference_ranks, take a smaller model or algorithm.kl_coefficient=0",
    "teacher": "raise teacher.ranks, or take a smaller teacher",
    "reward_model": "take a smaller reward.model",
}
WAYS = {
    True: "samples packed into one row, shared prefixes once",
    False: "samples in padded rows, or end to end if there are kernels for that, because layers of this model look at "
    "other tokens in ways of their own",
}
"""See `workers/trainer/way.py`."""
_WHERE = {
    Transport.shm: "in /dev/shm of each machine with ranks of the trainer; engines read it there",
    Transport.p2p: "sent to each engine: what its workers hold, by the ranks that have it",
    Transport.ipc: "copied by each engine out of the memory of the trainer's GPUs",
    Transport.disk: "in run.dir for a whole version; in bfloat16 most versions are a part of that",
}


def dry_run(config: Config, *, json_wanted: bool) -> int:
    """Print the estimate; returns the exit code, 0. Raises ConfigError for whatever the run would refuse."""
    from rlflow.algorithms.registry import check_functions

    check_functions(config)
    found, decided = _estimated(config)
    print(json.dumps(as_json(found)) if json_wanted else as_text(found, decided, config))
    return 0


def check_main_memory(config: Config) -> list[str]:
    """What a person should know of the main memory of cluster.pools before the run is sent there."""
    if all(pool.memory_gb is None for pool in config.cluster.pools.values()):
        return []
    try:
        found, _ = _estimated(config)
    except (ConfigError, ModuleNotFoundError) as error:
        return [f"whether its pods have enough memory was not checked: {first_line(error)}"]
    return too_much(found.hosts)


def _estimated(config: Config) -> tuple[Estimate, Config]:
    """The estimate, and the settings with what null has become on the machines. Raises ConfigError."""
    from rlflow.models.resolve import REWARD, check_gives_score, has_tokenizer, resolve_config
    from rlflow.tools.dry_run.model import read_model, read_reward_model, read_teachers  # imports torch, transformers
    from rlflow.workers.engine.setup import check_engine
    from rlflow.workers.engine.tokens import check_tokens
    from rlflow.workers.trainer.heads import check_heads
    from rlflow.workers.trainer.token_logprobs import MAX_LOGITS

    machines = machines_of(config.cluster.pools)
    on_gpus = machines is None or any(machine.gpus for machine in machines)
    config = by_device(config, on_gpus=on_gpus)
    check(config)  # what null has become may be refused
    folder = resolve_config(config.model.path)
    check_heads(config, folder)
    facts = read_model(config, folder)
    if config.rollout.engines:
        check_engine(config, facts.cache, folder, on_gpu=on_gpus)
    if has_tokenizer(Path(folder)):
        check_tokens(config, folder)
    scorers = [resolve_config(path, REWARD) for path in model_paths(config.reward).values()]
    for each in scorers:
        check_gives_score(Path(each))
    read = (read_reward_model(config, each) for each in scorers)
    scorer = max(read, key=lambda facts: facts.num_parameters, default=None)
    return estimate(config, facts, MAX_LOGITS, scorer, read_teachers(config)), config


def as_json(found: Estimate) -> dict[str, Any]:
    """Every figure by its name; memory in bytes."""
    totals = {name: {"total": memory.total, **asdict(memory)} for name, memory in found.processes.items()}
    return {**asdict(found), "processes": totals, "num_gpus": found.gpus[-1].last + 1}


def as_text(found: Estimate, config: Config, asked: Config) -> str:
    """`asked` is the settings as they were given, with null where the machines decide."""
    model = f"{found.model_type}, {found.num_layers} layers, {found.num_parameters:,} parameters, {found.dtype}"
    weights, largest = found.weights, f"the largest tensor {size(found.weights.largest)} in float32"
    sent = [
        "A new version of the weights",
        f"  {size(weights.staged):>10}  {_WHERE[weights.transport]}",
        *([f"  weights.transport={weights.transport.value}: {weights.reason}"] if weights.reason else []),
        *([f"  {size(weights.gathered):>10}  gathered by the ranks; {largest}"] if weights.gathered else []),
    ]
    sections = [
        [
            f"{found.recipe}: {model}",
            "Worked out from the settings and config.json; nothing was started.",
            f"Training: {WAYS[found.is_packed]}; the start of the run measures that this is exact.",
            *_by_device(asked, config),
        ],
        _gpus(found),
        *([["Machines", *(f"  {line}" for line in found.machines)]] if found.machines else []),
        *(_process(name, memory, found.micro_batch_tokens) for name, memory in found.processes.items()),
        _step(found, config),
        *([sent] if config.rollout.engines else []),
        _start(found),
        *([_hosts(found)] if found.hosts else []),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _by_device(asked: Config, config: Config) -> list[str]:
    """One line with the settings that the machines decide, if any is left to them."""
    keys = ("model.dtype", "rollout.max_running", "rollout.seeded", "rollout.kv_cache_gb")
    chosen = {key: attrgetter(key)(config) for key in keys if attrgetter(key)(asked) is None}
    words = {None: "what is left", True: "true", False: "false"}
    shown = ", ".join(f"{key}={words.get(value, value)}" for key, value in chosen.items())
    return [f"Chosen for the machines: {shown}."] if shown else []


def _start(found: Estimate) -> list[str]:
    start = found.start
    lines = ["Main memory while a trainer starts, beside the cache of files"]
    lines.append(f"  {size(start.rank):>10}  for each rank, which reads the parts that it keeps one by one")
    if start.converted:
        lines.append(f"  {size(start.converted):>10}  for rank 0, which loads this family whole and sends the parts")
    return lines


def _hosts(found: Estimate) -> list[str]:
    lines = ["Main memory of each machine, about, without the cache of files"]
    for host in found.hosts:
        lines.append(f"  {host.pool}")
        lines += [f"  {size(item.num_bytes):>10}  {item.name} ({item.note})" for item in host.items]
        limit = "" if host.limit is None else f"; its pod has {size(host.limit)}"
        lines.append(f"  {size(host.total):>10}  in all{limit}")
    return [*lines, *(f"  TOO LITTLE: {line}" for line in too_much(found.hosts))]


def _gpus(found: Estimate) -> list[str]:
    lines = [f"GPUs: {found.gpus[-1].last + 1} (without any, the same processes share the machine's memory)"]
    for each in found.gpus:
        numbers = str(each.first) if each.first == each.last else f"{each.first} to {each.last}"
        verdict = "NO GPU IS LARGE ENOUGH" if each.gpu_size is None else f"a GPU of {each.gpu_size} GB or more"
        lines.append(f"  {numbers:>9}  {size(each.num_bytes):>10} of each: {verdict}; {each.holds}")
    lines.append(f"  A GPU is taken to hold what fits into {USABLE:.0%} of it; CUDA and vLLM's graphs need the rest.")
    if not found.machines:
        lines.append("  Ray chooses the machines; the GPUs of one engine are of one machine.")
    return lines


def _process(name: str, memory: ProcessMemory, num_tokens: int) -> list[str]:
    lines = [_TITLES[name].format(tokens=num_tokens)]
    for item in memory.items:
        lines.append(f"  {size(item.num_bytes):>10}  {item.name} ({item.note})")
    lines.append(f"  {size(memory.total):>10}  in all")
    if smallest_gpu(memory.total) is None:
        lines.append(f"  {'':>10}  too much for any GPU: {_CURES[name]}")
    return lines


def _step(found: Estimate, config: Config) -> list[str]:
    batch, bound = found.batch, config.staleness.max_versions
    micro_batches = f"  at most {_count(batch.micro_batches, 'micro-batch', 'micro-batches')} a rank"
    if batch.updates > 1:
        micro_batches += f" in {batch.updates} updates"
    if batch.micro_batches_one_by_one is not None:
        micro_batches += f" when its groups come together, {batch.micro_batches_one_by_one:,} when one by one"
    live = (
        f"  at most {_count(batch.live_groups, 'group')} ({_count(batch.live_episodes, 'episode')}) live under "
        f"staleness.max_versions={bound}"
    )
    lines = [
        "A step",
        f"  {_count(batch.groups, 'group')} of {config.algorithm.group_size}: "
        f"{_count(batch.episodes, 'episode')}, at most {batch.tokens:,} tokens",
        micro_batches,
    ]
    if not config.rollout.engines:
        return [*lines, live]
    return [
        *lines,
        f"{live}; the engines decode at most {batch.decoding:,} at once",
        f"  an engine's cache holds {_count(batch.cached_sequences, 'sequence')} of "
        f"{config.model.max_length:,} tokens, and more of shorter ones; rollout.max_running={max_running(config)}",
    ]


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
