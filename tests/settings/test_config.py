"""Every message of `rlflow.settings.checks.check`, and what Hydra composes from the shipped recipes."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from composed import compose_recipe

from rlflow.algorithms.registry import check_functions
from rlflow.config import (
    Backend,
    Config,
    Dtype,
    Late,
    ModelPlacement,
    Offload,
    Optimizer,
    Order,
    Placement,
    Proximal,
    Quantization,
    Schedule,
    Send,
    Transport,
    Update,
)
from rlflow.errors import ConfigError
from rlflow.settings.checks import check
from rlflow.settings.compose import FREE_KEYS
from rlflow.settings.explain import expected, leaf_keys, other_names, unknown_key
from rlflow.settings.recipe_files import recipe_names, recipe_summary, recipe_text


def config_with(settings: dict[str, Any]) -> Config:
    config = Config()
    for key, value in settings.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    return config


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"run.steps": 0}, "run.steps must be positive; got 0"),
    ({"rollout.max_running": 0}, "rollout.max_running must be positive; got 0"),
    ({"rollout.stop": ["\n", ""]}, "rollout.stop has an empty text, which would end every reply at once; leave it out"),
    (
        {"rollout.engine_args": {"dtype": "half"}},
        "rollout.engine_args.dtype follows from model.dtype; set that instead",
    ),
    (
        {"rollout.engine_args": {"gpu_memory_utilization": 0.5}},
        "rollout.engine_args.gpu_memory_utilization follows from rollout.kv_cache_gb; set that instead",
    ),
    (
        {"rollout.engine_args": {"logprobs_mode": "raw_logprobs"}},
        "rollout.engine_args.logprobs_mode cannot be chosen, because rlflow relies on the value that it sets; leave it "
        "out",
    ),
    (
        {"rollout.engine_args": {"data_parallel_rank": 1}},
        "rollout.engine_args.data_parallel_rank cannot be chosen, because rlflow relies on the value that it sets; "
        "leave it out",
    ),
    (
        {"rollout.engine_args": {"kv_cache_dtypes": "fp8"}},
        "rollout.engine_args.kv_cache_dtypes is not an argument of vLLM's AsyncEngineArgs; did you mean "
        "kv_cache_dtype?",
    ),
    (
        {"rollout.expert_parallel": True},
        "rollout.expert_parallel has no effect with rollout.tensor_parallel=1, where one GPU has all experts; raise "
        "rollout.tensor_parallel, or leave it false",
    ),
    (
        {"rollout.quantization": Quantization.fp8, "model.dtype": Dtype.float32},
        "rollout.quantization=fp8 does not go with model.dtype=float32, because vLLM rounds from 16 bits only; set "
        "model.dtype=bfloat16, or leave it null",
    ),
    (
        {"rollout.quantization": Quantization.fp8, "lora.rank": 4},
        "rollout.quantization=fp8 rounds each version as it comes, and with lora.send=adapters only adapters do; set "
        "lora.send=merged, or rollout.quantization to null",
    ),
    ({"trainer.learning_rate": math.nan}, "trainer.learning_rate must be a finite number; got nan"),
    ({"rollout.temperature": math.inf}, "rollout.temperature must be a finite number; got inf"),
    ({"staleness.max_versions": -1}, "staleness.max_versions must not be negative; got -1"),
    ({"trainer.beta2": 1.0}, "trainer.beta2 must be in [0, 1); got 1.0"),
    (
        {"trainer.schedule_args": {"floor": 0.1}},
        "trainer.schedule_args={'floor': 0.1} has no effect with trainer.schedule=constant; leave it out, or set "
        "trainer.schedule to linear or cosine",
    ),
    (
        {"trainer.schedule": Schedule.cosine, "trainer.schedule_args": {"flour": 0.1}},
        "trainer.schedule_args takes floor and effective_share; got flour",
    ),
    (
        {"trainer.schedule_args": {"effective_share": 2}},
        "trainer.schedule_args.effective_share must be a power from 0, which is off, to 1; got 2",
    ),
    ({"algorithm.entropy_target": 0.0}, "algorithm.entropy_target must be positive; got 0.0"),
    (
        {"reward.model": "some/model", "reward.args": {"clip": 0.0}},
        "reward.args.clip must be positive, or null for no clip; got 0.0",
    ),
    (
        {"trainer.schedule": Schedule.cosine, "trainer.schedule_args": {"floor": 1}},
        "trainer.schedule_args.floor must be a share of trainer.learning_rate in [0, 1); got 1",
    ),
    (
        {"trainer.schedule": Schedule.linear, "trainer.warmup_steps": 100},
        "trainer.schedule=linear has no effect with trainer.warmup_steps=100, because run.steps=100; lower "
        "trainer.warmup_steps, or set trainer.schedule=constant",
    ),
    (
        {"trainer.optimizer": Optimizer.adamw8bit, "trainer.backend": Backend.deepspeed, "trainer.zero_stage": 2},
        "trainer.optimizer=adamw8bit does not go with trainer.backend=deepspeed, whose flat buffers hold neither whole "
        "matrices nor moments of a byte; set trainer.optimizer=adamw, or trainer.backend=fsdp",
    ),
    (
        {"trainer.optimizer": Optimizer.muon, "trainer.ranks": 2, "trainer.tensor_parallel": 2},
        "trainer.optimizer=muon does not go with trainer.tensor_parallel=2, which cuts the matrices that Muon needs "
        "whole; set one of them back",
    ),
    (
        {"trainer.ranks": 8, "trainer.replicas": 2, "trainer.tensor_parallel": 8},
        "trainer.replicas times trainer.tensor_parallel must divide trainer.ranks (8); got 2 x 8",
    ),
    (
        {"trainer.ranks": 8, "trainer.replicas": 4, "trainer.sequence_parallel": 4},
        "trainer.replicas times trainer.sequence_parallel must divide trainer.ranks (8); got 4 x 4",
    ),
    (
        {"trainer.ranks": 4, "trainer.sequence_parallel": 2, "trainer.tensor_parallel": 2},
        "trainer.sequence_parallel=2 does not go with trainer.tensor_parallel=2, because both share out the heads; set "
        "one of them to 1",
    ),
    (
        {"trainer.ranks": 2, "trainer.replicas": 2, "trainer.backend": Backend.deepspeed, "trainer.zero_stage": 2},
        "trainer.replicas=2 has no effect with trainer.backend=deepspeed; set it to 1, or trainer.backend=fsdp",
    ),
    *(
        (
            {"run.profile_steps": steps},
            "run.profile_steps must be the first and the last of at most 5 steps, from 1 to run.steps (100); got "
            f"{steps}",
        )
        for steps in ([3], [0, 2], [4, 3], [99, 101], [1, 6])
    ),
    ({"cluster.cpu_threads": 0}, "cluster.cpu_threads must be at least 1, or null; got 0"),
    (
        {"algorithm.filter_on": "accuracy"},
        "algorithm.filter_on=accuracy has no effect with algorithm.dynamic_sampling=false; set it to null, or "
        "dynamic_sampling to true",
    ),
    (
        {"critic.warmup_steps": 100},
        "critic.warmup_steps=100 leaves no step to the policy, because run.steps=100; lower it, or raise run.steps",
    ),
    ({"algorithm.group_size": 0}, "algorithm.group_size must be at least 1; got 0"),
    (
        {"algorithm.group_size": 1, "algorithm.dynamic_sampling": True},
        "algorithm.dynamic_sampling=true drops groups of equal rewards, and with algorithm.group_size=1 a group has "
        "only one; set it to false, or raise the size",
    ),
    (
        {"curriculum.kind": "difficulties"},
        "curriculum.kind=difficulties is not a curriculum; did you mean difficulty? There are balanced, "
        "difficulty, uniform; your own is package.module:Name or file.py:Name",
    ),
    (
        {"curriculum.kind": "balanced", "curriculum.args": {"explore": 0.1}},
        "curriculum.args.explore is not an argument of curriculum.kind=balanced, which takes weights",
    ),
    (
        {"algorithm.kl": "k1"},
        "algorithm.kl=k1 has no effect with algorithm.kl_coefficient=0; set the coefficient",
    ),
    (
        {"algorithm.kl_in_reward": True},
        "algorithm.kl_in_reward has no effect with algorithm.kl_coefficient=0; set the coefficient, or it to false",
    ),
    (
        {"algorithm.kl_in_reward": True, "algorithm.kl_coefficient": 0.1, "algorithm.kl": "k1"},
        "algorithm.kl=k1 has no effect with algorithm.kl_in_reward=true, because no estimate is in the loss then; "
        "leave it out",
    ),
    (
        {"algorithm.kl_target": 0.1},
        "algorithm.kl_target must be positive, with an algorithm.kl_coefficient to begin with; got 0.1 and 0.0",
    ),
    (
        {"algorithm.entropy_high": 0.3},
        "algorithm.entropy_low and entropy_high must be null both, or 0 <= low < high; got None and 0.3",
    ),
    ({"lora.rank": 0}, "lora.rank must be at least 1, or null to train the whole model; got 0"),
    ({"lora.rank": 4, "lora.alpha": 0.0}, "lora.alpha must be positive; got 0.0"),
    ({"lora.alpha": 16.0}, "lora.alpha=16.0 has no effect with lora.rank=null; set lora.rank"),
    (
        {"lora.rank": 4, "lora.send": Send.merged, "weights.transport": Transport.p2p},
        "weights.transport=p2p does not go with lora.send=merged: no rank has a part of what is merged; set "
        "weights.transport to shm or disk",
    ),
    (
        {"weights.transport": Transport.ipc},
        "weights.transport=ipc is for engines on the trainer's GPUs; set cluster.placement=colocated, or "
        "weights.transport=p2p",
    ),
    ({"lora.send": Send.merged}, "lora.send=merged has no effect with lora.rank=null; set lora.rank"),
    (
        {"algorithm.balance_coefficient": 0.01, "trainer.compile": True},
        "trainer.compile has no effect with trainer.backend=deepspeed, trainer.tensor_parallel or "
        "trainer.sequence_parallel above 1, lora.rank or algorithm.balance_coefficient; set it to null",
    ),
    ({"algorithm.balance_coefficient": -1.0}, "algorithm.balance_coefficient must not be negative; got -1.0"),
    (
        {"model.dtype": Dtype.float32, "model.float32_head": True},
        "model.float32_head has no effect with model.dtype=float32, in which the output layer is computed too; leave "
        "it false",
    ),
    ({"lora.targets": ["q_proj"]}, "lora.targets=['q_proj'] has no effect with lora.rank=null; set lora.rank"),
    ({"lora.dropout": 0.1}, "lora.dropout=0.1 has no effect with lora.rank=null; set lora.rank"),
    ({"lora.rank_stabilised": True}, "lora.rank_stabilised has no effect with lora.rank=null; set lora.rank"),
    (
        {"lora.rank": 4, "lora.targets": []},
        "lora.targets names no layer; name some, or set it to null for all linear layers",
    ),
    ({"lora.rank": 4, "lora.dropout": 1.0}, "lora.dropout must be in [0, 1); got 1.0"),
    (
        {"lora.rank": 513},
        "lora.rank=513 is more than the 512 that engines take with lora.send=adapters; lower it, or set "
        "lora.send=merged",
    ),
    (
        {"lora.rank": 4, "trainer.ranks": 2, "trainer.tensor_parallel": 2},
        "lora.rank=4 does not go with trainer.tensor_parallel=2: adapters are not cut into slices; set "
        "trainer.tensor_parallel to 1, which adapters leave memory for",
    ),
    ({"critic.value_clip": 0.0}, "critic.value_clip must be positive, or null for no clip; got 0.0"),
    (
        {"algorithm.proximal": Proximal.interpolated, "staleness.max_versions": 1},
        "algorithm.proximal=interpolated has no effect where no token is older than one version; got "
        "staleness.max_versions=1; raise it to 2 or more, or take behaviour",
    ),
    (
        {"algorithm.minibatches": 3},
        "algorithm.minibatches must divide algorithm.groups_per_step (8), because each has equally many whole groups; "
        "got 3",
    ),
    ({"algorithm.epochs": 0}, "algorithm.epochs must be positive; got 0"),
    (
        {"algorithm.proximal": Proximal.interpolated, "algorithm.epochs": 2, "staleness.max_versions": 2},
        "algorithm.proximal=interpolated estimates the policy before the only update of a step, and here a step makes "
        "2 (algorithm.epochs, algorithm.minibatches); take recomputed",
    ),
    (
        {"trainer.streaming": False, "algorithm.minibatches": 2},
        "trainer.streaming=false has no effect with several updates a step (algorithm.epochs, algorithm.minibatches), "
        "which wait for its groups anyway; leave it null",
    ),
    (
        {"algorithm.overlong_tokens": 512},
        "algorithm.overlong_tokens must be from 1 to rollout.max_new_tokens (256), or null; got 512",
    ),
    (
        {"staleness.order": Order.ready_first},
        "staleness.order=ready_first has no effect with staleness.max_versions=0, where all groups of a step are of "
        "one version; set it to oldest_first, or raise staleness.max_versions",
    ),
    (
        {"rollout.oversample": 0.5},
        "rollout.oversample must be from 1, which is off, to 4, such as 1.25; got 0.5",
    ),
    (
        {"rollout.oversample_episodes": math.inf},
        "rollout.oversample_episodes must be from 1, which is off, to 4, such as 1.25; got inf",
    ),
    (
        {"rollout.oversample": 1.25, "staleness.max_versions": 1},
        "rollout.oversample=1.25 has no effect with staleness.order=oldest_first, under which every group is waited "
        "for; set that to ready_first, or rollout.oversample to 1",
    ),
    *(
        (
            {key: 1.25, "rollout.engines": 0},
            f"{key}=1.25 has no effect with rollout.engines=0, where nothing is sampled; leave it out",
        )
        for key in ("rollout.oversample", "rollout.oversample_episodes")
    ),
    (
        {"staleness.max_versions": 1, "staleness.late": Late.mask},
        "staleness.late=mask has no effect with staleness.order=oldest_first, under which no group is late; set it to "
        "requeue, or staleness.order to ready_first",
    ),
    (
        {"cluster.placement": Placement.colocated, "trainer.streaming": False},
        "trainer.streaming=false has no effect with cluster.placement=colocated, which trains a step when its last "
        "group is ready; leave it null",
    ),
    (
        {"staleness.max_versions": 1, "rollout.update": Update.all},
        "rollout.update=all has no effect with a single engine, with staleness.max_versions=0 or with "
        "cluster.placement=colocated, where engines load at once anyway; leave it at rolling",
    ),
    (
        {"rollout.drain": True},
        "rollout.drain has no effect with staleness.max_versions=0 or with cluster.placement=colocated, where "
        "nothing that is trained is under way when weights are loaded; leave it false",
    ),
    (
        {"rollout.keep_cache": True},
        "rollout.keep_cache has no effect with staleness.max_versions=0, with cluster.placement=colocated or with "
        "rollout.drain=true, where nothing that is trained is under way when weights are loaded; leave it null",
    ),
    (
        {"staleness.max_versions": 2, "rollout.drain": True, "rollout.keep_cache": True},
        "rollout.keep_cache has no effect with staleness.max_versions=0, with cluster.placement=colocated or "
        "with rollout.drain=true, where nothing that is trained is under way when weights are loaded; leave it null",
    ),
    (
        {"reward.model": "mine", "reward.function": "my.py:score"},
        "reward.function=my.py:score and reward.model=mine both score; say in reward.weights how they count together, "
        "functions first, or set reward.function=null",
    ),
    (
        {"reward.model": "mine", "reward.workers": 4},
        "reward.workers=4 has no effect with reward.model; set it to 1, and reward.model_replicas for more processes",
    ),
    (
        {"reward.model_replicas": 2},
        "reward.model_replicas=2 has no effect without reward.model; give one, or set reward.workers for more "
        "processes that call a function",
    ),
    (
        {"cluster.roles": ModelPlacement.shared},
        "cluster.roles=shared has no effect without a critic, a reference, a teacher or a reward model (with lora.rank "
        "the policy is its own reference); set it to separate",
    ),
    (
        {
            "cluster.roles": ModelPlacement.shared,
            "reward.model": "mine",
            "reward.model_replicas": 3,
            "trainer.ranks": 2,
        },
        "cluster.roles=shared puts each replica of the reward model on the GPU of another rank of the trainer; got "
        "reward.model_replicas=3 and trainer.ranks=2; lower the first, or set cluster.roles=separate",
    ),
    ({"eval.episodes": 4}, "eval.episodes=4 has no effect with eval.every=0; set eval.every"),
    (
        {"rollout.max_new_tokens": 1024},
        "rollout.max_new_tokens (1024) leaves no room for a prompt within model.max_length (1024); "
        "lower the first or raise the second",
    ),
    (
        {"trainer.backend": Backend.deepspeed},
        "trainer.zero_stage must be 1, 2 or 3 with trainer.backend=deepspeed; got null",
    ),
    (
        {"trainer.backend": Backend.deepspeed, "trainer.zero_stage": 4},
        "trainer.zero_stage must be 1, 2 or 3 with trainer.backend=deepspeed; got 4",
    ),
    (
        {"trainer.backend": Backend.deepspeed, "trainer.zero_stage": 1, "model.dtype": Dtype.bfloat16},
        "trainer.zero_stage=1 with model.dtype=bfloat16 would add gradients up in bfloat16, and to add them up in "
        "float32 DeepSpeed takes another class of optimiser there, BF16_Optimizer, which rlflow cannot save; set "
        "trainer.zero_stage to 2, which adds them up in float32 and takes less memory",
    ),
    (
        {"trainer.zero_stage": 3},
        "trainer.zero_stage=3 has no effect with trainer.backend=fsdp; set it to null, or trainer.backend=deepspeed",
    ),
    (
        {"trainer.backend": Backend.deepspeed, "trainer.zero_stage": 2, "trainer.nvme_path": "/scratch"},
        "trainer.nvme_path=/scratch has no effect without trainer.backend=deepspeed and trainer.zero_stage=3; set "
        "these, or trainer.nvme_path to null",
    ),
    (
        {
            "trainer.backend": Backend.deepspeed,
            "trainer.zero_stage": 3,
            "trainer.nvme_path": "/scratch",
            "trainer.offload": Offload.cpu,
        },
        "trainer.offload=cpu contradicts trainer.nvme_path=/scratch, where everything goes; set one of them only",
    ),
    ({"trainer.tensor_parallel": 0}, "trainer.tensor_parallel must be positive; got 0"),
    (
        {"trainer.tensor_parallel": 2, "trainer.ranks": 3},
        "trainer.tensor_parallel must divide trainer.ranks (3); got 2",
    ),
    ({"trainer.sequence_parallel": 0}, "trainer.sequence_parallel must be positive; got 0"),
    (
        {"trainer.sequence_parallel": 2, "trainer.ranks": 3},
        "trainer.sequence_parallel must divide trainer.ranks (3); got 2",
    ),
    (
        {
            "trainer.tensor_parallel": 2,
            "trainer.ranks": 2,
            "trainer.backend": Backend.deepspeed,
            "trainer.zero_stage": 3,
        },
        "trainer.tensor_parallel=2 has no effect with trainer.backend=deepspeed; set it to 1, or trainer.backend=fsdp",
    ),
    (
        {"trainer.micro_batch_tokens": 1000},
        "trainer.micro_batch_tokens (1000) must hold at least one sequence of model.max_length (1024) tokens",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_a_setting_that_cannot_work_is_refused_with_the_cure(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check(config_with(settings))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "settings",
    [
        {"reward.model": "mine", "reward.model_replicas": 2, "trainer.ranks": 2},
        {"algorithm.kl_coefficient": 0.1},
        {"algorithm.advantage": "gae"},
    ],
)
def test_models_beside_the_trainer_can_share_its_gpus(settings: dict[str, Any]) -> None:
    check(config_with({"cluster.roles": ModelPlacement.shared, **settings}))


def test_the_defaults_pass() -> None:
    check(Config())
    check_functions(Config())


WRONG_FUNCTIONS: list[tuple[dict[str, Any], str]] = [
    ({"algorithm.loss": "ppo_clp"}, "algorithm.loss=ppo_clp is not a loss; did you mean ppo_clip?"),
    (
        {"algorithm.loss_args": {"clip_hi": 0.3}},
        "algorithm.loss_args.clip_hi is not an argument of the loss ppo_clip, which takes clip_low, clip_high, "
        "dual_clip; did you mean clip_high?",
    ),
    (
        {"algorithm.loss_args": {"clip_low": 2.0}},
        "clip_low must be above 0 and at most 1, or null for no clip; got 2.0",
    ),
    ({"algorithm.corrections": {"tis": 3}}, "algorithm.corrections.tis must be options as name: value; got 3"),
    (
        {"algorithm.corrections": {"tis": None}},
        "algorithm.corrections.tis weighs by the ratio to the policy that sampled, which algorithm.loss=ppo_clip does "
        "already; take algorithm.loss=reinforce,",
    ),
    (
        {"algorithm.loss": "aipo", "algorithm.corrections": {"icepop": None}},
        "algorithm.corrections.icepop weighs by the ratio to the policy that sampled, which algorithm.loss=aipo does",
    ),
    (
        {"algorithm.loss": "reinforce", "algorithm.proximal": Proximal.recomputed, "algorithm.epochs": 2},
        "algorithm.proximal=recomputed has no effect with algorithm.loss=reinforce, which does not compare",
    ),
    (
        {"algorithm.loss": "aipo", "algorithm.proximal": Proximal.interpolated, "staleness.max_versions": 4},
        "algorithm.proximal=interpolated has no effect with algorithm.loss=aipo, which does not compare",
    ),
    (
        {"staleness.max_versions": 1, "staleness.order": Order.ready_first, "staleness.late": Late.train},
        "staleness.late=train trains on tokens of any age, which needs a correction; take algorithm=tis, or set",
    ),
    (
        {"algorithm.kl_in_reward": True, "algorithm.kl_coefficient": 0.1},
        "algorithm.kl_in_reward=true needs rewards of single tokens, and algorithm.advantage=grpo compares episodes;",
    ),
    (
        {"critic.learning_rate": 1e-4},
        "critic has no effect with algorithm.advantage=grpo, which needs no critic; leave its settings alone, or take",
    ),
    (
        {"algorithm.advantage": "gae", "algorithm.advantage_args": {"trace": 2.0}},
        "trace must be from 0 to 1; got 2.0",
    ),
    (
        {"algorithm.advantage": "reinforce_pp", "trainer.streaming": False},
        "trainer.streaming=false has no effect with algorithm.advantage=reinforce_pp, which waits for all groups",
    ),
]


@pytest.mark.parametrize(("settings", "message"), WRONG_FUNCTIONS)
def test_functions_that_do_not_exist_or_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    config = config_with(settings)
    check(config)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        check_functions(config)


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm.loss": "reinforce", "algorithm.corrections": {"tis": {"cap": 3.0}, "veto": None}},
        {"algorithm.loss": "ppo_clip", "algorithm.corrections": {"veto": {}}},
        {"algorithm.proximal": Proximal.recomputed, "algorithm.corrections": {"tis": {}}, "algorithm.epochs": 2},
        {"algorithm.proximal": Proximal.recomputed, "algorithm.advantage": "gae", "algorithm.minibatches": 8},
        {
            "algorithm.proximal": Proximal.interpolated,
            "staleness.max_versions": 4,
            "algorithm.corrections": {"mis": {}},
        },
        {"algorithm.loss": "gspo", "algorithm.loss_args": {"clip_low": 3e-4, "clip_high": 4e-4}},
    ],
)
def test_functions_that_go_together(settings: dict[str, Any]) -> None:
    config = config_with(settings)
    check(config)
    check_functions(config)


def test_there_are_at_most_150_settings() -> None:
    keys = leaf_keys()
    assert {"run.steps", "env.args", "deadlines.checkpoint_s"} <= keys.keys()
    assert len(keys) <= 150


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "a whole number"),
        (bool, "true or false"),
        (float | None, "a number, or null"),
        (str | None, "text, or null"),
        (Backend, "one of " + ", ".join(Backend.__members__)),
        (dict[str, Any], "a mapping"),
        (list[float] | None, "a list of numbers, or null"),
    ],
)
def test_types_are_told_in_words(kind: Any, words: str) -> None:
    assert expected(kind) == words


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("run.stepz", "run.stepz is not a setting; did you mean run.steps?"),
        ("lr", "lr is not a setting; TRL's lr is trainer.learning_rate here"),
        ("trainer.lr", "trainer.lr is not a setting; TRL's lr is trainer.learning_rate here"),
        ("critic.lr", "critic.lr is not a setting; verl's critic.optim.lr is critic.learning_rate here"),
        ("num_generations", "num_generations is not a setting; TRL's num_generations is algorithm.group_size here"),
        (
            "batch_size",
            "batch_size is not a setting; TRL's batch_size is algorithm.groups_per_step here (it counts groups, and a "
            "step has groups_per_step x group_size episodes)",
        ),
        ("use_vllm", "use_vllm is not a setting; TRL's use_vllm has no counterpart: engines are always vLLM"),
        ("rollout.n", "rollout.n is not a setting; verl's actor_rollout_ref.rollout.n is algorithm.group_size here"),
        (
            "reward_model.path",
            "reward_model.path is not a setting; verl's reward_model.path is reward.model here",
        ),
        ("kl_coef", "kl_coef is not a setting; OpenRLHF's kl_coef is algorithm.kl_coefficient here"),
        ("trainer.nothing", "trainer.nothing is not a setting; `rlflow train --help` lists them all"),
        ("trainer.optimiser", "trainer.optimiser is not a setting; did you mean trainer.optimizer?"),
        ("rollouts.engines", "rollouts.engines is not a setting; did you mean rollout.engines?"),
        ("sampling.top_p", "sampling.top_p is not a setting; did you mean rollout.top_p?"),
        ("learning_rate", "learning_rate is not a setting; did you mean trainer.learning_rate?"),
        ("rollout.learning_rate", "rollout.learning_rate is not a setting; did you mean trainer.learning_rate?"),
        ("recipes", "recipes is not a setting; did you mean recipe?"),
    ],
)
def test_an_unknown_key_names_the_nearest(typed: str, meant: str) -> None:
    assert unknown_key(typed) == meant


def test_every_name_of_another_library_has_a_setting_here_or_says_why_not() -> None:
    shared = [name for names in other_names().values() for name in names]
    assert len(shared) >= 80
    for library, names in other_names().items():
        for theirs, (here, *note) in names.items():
            is_free = here is not None and here.startswith(FREE_KEYS)
            assert is_free or here in {*leaf_keys(), "cluster.pools"} or (here is None and note), f"{library}: {theirs}"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_composes_passes_and_says_what_it_is_for(name: str) -> None:
    check(compose_recipe(f"recipe={name}"))
    assert recipe_summary(name).endswith((".", "?"))


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_gives_a_reason_on_each_line_that_sets_something(name: str) -> None:
    settings = [line for line in recipe_text(name).splitlines() if line.startswith("  ")]
    obvious = ("  groups_per_step:", "  group_size:", "  max_new_tokens:", "  show_samples_every:", "  steps:")
    assert [line for line in settings if "#" not in line and not line.startswith(obvious)] == []


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_goes_together(name: str) -> None:
    config = compose_recipe(f"recipe={name}")
    check(config)
    check_functions(config)


@pytest.mark.parametrize(
    "name", ["async_latency", "dapo_arithmetic", "grpo_32b", "grpo_7b", "grpo_arithmetic", "smoke"]
)
def test_recipes_that_choose_no_loss_can_use_tis(name: str) -> None:
    config = compose_recipe(f"recipe={name}", "algorithm=tis")
    check(config)
    check_functions(config)
    assert (config.algorithm.loss, config.algorithm.corrections) == ("reinforce", {"tis": {"cap": 2.0}})


def test_numbers_keep_their_types() -> None:
    config = compose_recipe("recipe=grpo_arithmetic", "run.steps=5")
    assert isinstance(config.trainer.learning_rate, float)
    assert config.run.steps == 5
    check(config)
