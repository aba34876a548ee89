"""Whether a run fits, what to change when it does not, and its cost under each rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.small_plan import CPU, EXACT, GPU, SHAPE, changed, small

from gxpo_trainer.config import BudgetConfig, GrpoRule, GxpoRule
from gxpo_trainer.config.io import load_preset
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner import Inputs, inputs_of, make_plan, refusal
from gxpo_trainer.planner.devices import device_named, devices_of_cluster
from gxpo_trainer.planner.inputs import read_shape, shape_of
from gxpo_trainer.planner.plan import fit_of
from gxpo_trainer.planner.report import to_text, view_of

BIG = replace(SHAPE, hidden=4096, intermediate=16384, layers=32, heads=32, kv_heads=8, head_dim=128, vocabulary=128_000)
"""7.98 billion parameters."""


def big(**changes: Any) -> Any:
    batch = {"prompts_per_step": 64, "samples_per_prompt": 8, "token_budget": 4096, "gradient_checkpointing": True}
    sizes = {"max_prompt_tokens": 512, "max_new_tokens": 1024, "max_length": 2048}
    devices = {"device": device_named("a100-80"), "num_devices": 8, "learner_ranks": 4}
    return small(**({"shape": BIG} | batch | sizes | devices | changes))


@pytest.mark.parametrize("name", ["a100-40", "a100-80", "h200"])
@pytest.mark.parametrize("colocate", [False, True])
def test_what_is_automatic_keeps_activations_of_the_largest_micro_batch_that_fits(name: str, colocate: bool) -> None:
    device = device_named(name)
    changes: dict[str, Any] = {"device": device, "learner_ranks": 1 if colocate else 7, "colocate": colocate}
    asked = big(shape=replace(BIG, layers=3 if colocate else 24), zero_stage=2, num_devices=8, **changes)
    if colocate:
        asked = changed(asked, num_devices=1)
    plan = make_plan(changed(asked, gradient_checkpointing="auto", token_budget="auto"))
    chosen = (plan.inputs.checkpointing, plan.inputs.config.learner.token_budget)
    order = [(again, tokens) for again in (False, True) for tokens in (16384, 8192, 4096)]
    for again, tokens in order[: order.index(chosen) + 1]:
        fit = make_plan(changed(asked, gradient_checkpointing=again, token_budget=tokens)).fit
        update = next(phase for phase in fit.phases if "activations" in phase.parts)
        room = fit.fits and (fit.resident or 1.15 * update.num_bytes <= device.memory_bytes)
        assert room == ((again, tokens) == chosen) or (again, tokens) == order[-1]


def test_settings_that_are_stated_are_not_automatic() -> None:
    inputs = big(gradient_checkpointing=True, token_budget=8192)
    assert make_plan(inputs).inputs == inputs
    only_one = make_plan(changed(inputs, gradient_checkpointing="auto")).inputs
    assert only_one.config.learner.token_budget == 8192


KEPT = {"learner_ranks": 7, "gradient_checkpointing": False, "token_budget": 16384}


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        (KEPT | {"zero_stage": 2}, "model.gradient_checkpointing = true"),
        (
            KEPT | {"zero_stage": 1},
            "learner.zero_stage = 3, model.gradient_checkpointing = true and learner.token_budget = 4096",
        ),
        # What changes the policy comes last: one rank cannot divide the parameters.
        ({"zero_stage": 1, "learner_ranks": 1, "num_devices": 2}, "learner.lora.rank = 16"),
    ],
)
def test_what_suffices_is_named_with_its_value(changes: dict[str, Any], settings: str) -> None:
    plan = make_plan(big(**changes))
    problem, _, advised = (plan.advice or "").partition("; set ")
    assert problem.startswith("learner: needs ")
    assert problem.endswith(" GiB per device and a100-80 has 79.3 GiB")
    assert (advised, refusal(plan)) == (settings, plan.advice)


@pytest.mark.parametrize(
    ("inputs", "advice"),
    [
        (
            small(num_devices=3, learner_ranks=4, prompts_per_step=8),
            "placement needs 5 GPUs (learner_ranks + samplers × tensor_parallel) and there are 3; "
            "set placement.learner_ranks = 2",
        ),
        (
            small(device=CPU, cpu_kv_cache_gib=32 * 59 / 2**30),
            "too little for one sequence of model.max_length = 60 tokens; set rollout.cpu_kv_cache_gib = 1",
        ),
        (big(shape=replace(BIG, layers=800)), "use a device with more memory, more devices or a smaller model"),
    ],
)
def test_the_placement_or_cache_that_solves_it_is_named_or_that_nothing_does(inputs: Inputs, advice: str) -> None:
    assert make_plan(inputs, EXACT).advice.endswith(advice)


def test_a_need_within_the_planners_error_is_a_warning_and_no_refusal() -> None:
    gib = 2**30
    process = replace(EXACT, runtime_bytes=gib)
    for limit, refused in ((0.9, False), (0.8, True)):
        device = replace(GPU, memory_bytes=int(limit * gib))
        plan = make_plan(small(device=device, gpu_memory_utilization=0.01), process)
        assert not plan.fit.fits
        assert plan.advice is not None
        assert (refusal(plan) is not None) is refused


def test_shared_devices_are_resident_where_both_fit_and_alternate_where_not() -> None:
    gib = 2**30
    shared = small(colocate=True, learner_ranks=1, num_devices=1)
    roomy = make_plan(changed(shared, device=replace(GPU, memory_bytes=8 * gib)), EXACT)
    # Learner 3 GiB and sampler 3 + 4: 10 of 10.2 GiB, but the learner may take 15% more than planned.
    close, roomier = (
        changed(shared, device=replace(GPU, memory_bytes=int(size * gib)), gpu_memory_utilization=4 / size)
        for size in (10.2, 11)
    )
    three = replace(EXACT, runtime_bytes=3 * gib)
    assert not make_plan(close, three).fit.resident
    assert make_plan(roomier, three).fit.resident
    assert roomy.inputs.devices_needed == 1
    assert roomy.fit.resident
    assert [phase.name for phase in roomy.fit.phases] == ["learner and sampler"]
    # 0.6 of 8 GiB for the sampler and 4 GiB of the learner's process do not fit together.
    heavy = replace(EXACT, runtime_bytes=4 * gib)
    tight = make_plan(changed(shared, device=replace(GPU, memory_bytes=8 * gib), gpu_memory_utilization=0.4), heavy)
    assert not tight.fit.resident
    sampling, update, sync = tight.fit.phases
    assert [phase.name for phase in (sampling, update, sync)] == ["sampling", "update", "sync"]
    # Two buckets of 1448 values in bf16 stay with the learner's runtime; everything else of it is on the host.
    cache = ["sampler weights", "sampler working memory", "KV cache"]
    assert list(sampling.parts) == ["runtime", "published weights", *cache, "sampler runtime"]
    assert sampling.parts["published weights"] == 2 * 2 * 1448
    kept = update.parts.keys() - {"activations", "logits", "rule buffers", "gradients"}
    assert sync.parts.keys() == {*kept, "sampler weights"}


def test_a_sleeping_sampler_keeps_its_graphs() -> None:
    heavy = replace(EXACT, runtime_bytes=4 * 2**30)
    shared = small(colocate=True, learner_ranks=1, num_devices=1, device=replace(GPU, memory_bytes=8 * 2**30))
    eager, captured = (make_plan(changed(shared, enforce_eager=one), heavy).fit.phases for one in (True, False))
    more = [after.num_bytes - before.num_bytes for before, after in zip(eager, captured, strict=True)]
    assert more == [2**30] * 3


def test_auto_shares_devices_where_there_are_too_few_and_the_counts_match() -> None:
    even = {"colocate": "auto", "samplers": 2, "learner_ranks": 2}
    assert not small(**even, num_devices=4).shared
    assert small(**even, num_devices=3).shared
    assert small(**even, num_devices=3).devices_needed == 2
    assert not small(**even, num_devices=3, strategy="split").shared
    assert not small(colocate="auto", num_devices=2).shared, "two ranks cannot share one sampler's device"
    assert make_plan(small(**even, num_devices=4), EXACT).fit.resident, "nothing is shared, nothing parked"


def test_a_host_sums_all_processes() -> None:
    one = fit_of(small(device=CPU, cpu_kv_cache_gib=1, learner_ranks=1), EXACT).phases[0]
    two = fit_of(small(device=CPU, cpu_kv_cache_gib=1, learner_ranks=1, samplers=2), EXACT).phases[0]
    sampler = fit_of(small(device=CPU, cpu_kv_cache_gib=1), EXACT).sampler
    assert two.num_bytes - one.num_bytes == sampler.weights + sampler.working + sampler.kv
    # More than a list could hold: the work does not grow with the number.
    many = fit_of(small(device=CPU, cpu_kv_cache_gib=1, learner_ranks=1, samplers=10**15), EXACT).phases[0]
    assert many.num_bytes - one.num_bytes == (10**15 - 1) * (two.num_bytes - one.num_bytes)


def test_rules_stand_side_by_side_with_the_runs_own_marked() -> None:
    plan = make_plan(small(rule=GxpoRule(k=10)), EXACT)
    assert [(rule.label, rule.own, rule.backward_passes_per_step) for rule in plan.rules] == [
        ("GRPO", False, 1),
        ("SFPO K=10", False, 11),
        ("GXPO K=10", True, 3),
    ]
    assert [rule.backward_passes for rule in plan.rules] == [10, 110, 30]
    hours = plan.rules[2].hours
    assert hours == pytest.approx(10 * plan.rules[2].seconds.step / 3600)
    assert plan.rules[2].gpu_hours == pytest.approx(3 * hours), "two ranks and a sampler"


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ({"steps": 7}, [7, 7, 7]),
        ({"backward_passes": 12}, [12, 3, 4]),  # SFPO K=3 takes 4 passes, GXPO 3
        ({"backward_passes": 13, "steps": 9}, [9, 4, 5]),
        ({"tokens": 1600}, [10, 10, 10]),  # 8 responses of 20 tokens a step
    ],
)
def test_the_first_bound_of_the_budget_gives_the_steps(budget: dict[str, int], steps: list[int]) -> None:
    plan = make_plan(small(rule=GxpoRule(k=3), budget=BudgetConfig.model_validate(budget)), EXACT)
    assert [rule.steps for rule in plan.rules] == steps


def test_a_bound_in_hours_is_spent_whole() -> None:
    plan = make_plan(small(rule=GrpoRule(), budget=BudgetConfig(hours=1.0)), EXACT)
    rule = plan.rules[0]
    assert (rule.steps - 1) * rule.seconds.step < 3600 <= rule.steps * rule.seconds.step


def test_inputs_come_from_a_config() -> None:
    apart = ["placement.learner_ranks=3", "placement.samplers=2", "placement.colocate=false"]
    config = load_preset("paper-7b-lora", apart)
    shape = read_shape(config.model.path)
    inputs = inputs_of(config, shape, device_named("h100-80"), 5)
    assert (inputs.config.placement.samplers, inputs.shared, inputs.devices_needed) == (2, False, 5)
    # q and o: 3584 + 3584; k and v: 3584 + 512; 28 layers of rank 128.
    assert inputs.trainable == 28 * 128 * (2 * 7168 + 2 * 4096)
    assert (inputs.sequences, inputs.group, inputs.prompt_limit) == (128 * 5, 5, 1024)
    assert inputs.reference_parameters == shape.parameters
    assert make_plan(inputs).fit.fits


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As the models' cards and weight files state them.
        ("paper-1.5b", 1_543_714_304),
        ("paper-3b", 3_085_938_688),
        ("paper-7b-lora", 7_615_616_512),
        ("paper-llama-3b", 3_212_749_824),
    ],
)
def test_the_papers_models_have_their_size_and_its_presets_fit_on_four_h100(name: str, parameters: int) -> None:
    config = load_preset(name)
    shape = read_shape(config.model.path)
    assert shape.parameters == parameters
    assert make_plan(inputs_of(config, shape, device_named("h100-80"), 4)).fit.fits


def test_experts_count_whole_and_a_token_passes_some() -> None:
    experts = {"moe_intermediate_size": 4, "num_experts": 6, "num_experts_per_tok": 2}
    sizes = {"hidden_size": 8, "intermediate_size": 99, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "qwen3_moe", "vocab_size": 10, **experts, **sizes}
    shape = shape_of(config, "m")
    # Attention 4·64 and two norms of 4, router 8·6, experts 3·8·4 each, norms 2·8.
    assert shape.layer_parameters() == 256 + 8 + 48 + 6 * 96 + 16
    assert shape.layer_parameters(active=True) == 256 + 8 + 48 + 2 * 96 + 16
    assert shape.parameters == shape.layer_parameters() + 2 * 80 + 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "config.json cannot be read"),
        ("[]", "is not a JSON object"),
        ('{"n_embd": 12}', "has no hidden_size; a plan needs the config of a decoder-only model"),
    ],
)
def test_a_folder_without_a_usable_config_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_shape(str(tmp_path))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(ConfigError, match="'org/unknown' is not a folder here, and its config is unknown"):
        read_shape("org/unknown")


def test_embeddings_are_tied_where_transformers_did_not_write_it() -> None:
    """Gemma's own default is True and that of all other families False; a file of transformers 4 may have neither."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for kind, tied in (("gemma3_text", True), ("llama", False), ("qwen3", False), ("phi3", False)):
        assert shape_of({"model_type": kind, "vocab_size": 10, **sizes}, "m").tied is tied
    assert not shape_of(
        {"model_type": "gemma3_text", "vocab_size": 10, "tie_word_embeddings": False, **sizes}, "m"
    ).tied


def test_adapters_of_fused_projections_are_counted() -> None:
    # Two layers of rank 3: 8 inputs with 8 + 2·4 outputs, and 8 with 2·16.
    assert SHAPE.adapter_parameters(3, ("qkv_proj",)) == 2 * 3 * (8 + 16)
    assert SHAPE.adapter_parameters(3, ("gate_up_proj",)) == 2 * 3 * (8 + 32)


def test_a_run_without_engines_needs_no_memory_for_them() -> None:
    """70 billion parameters fit eight H200 at ZeRO stage 3 with an adapter, and no GPU for an engine as a whole."""
    settings = [
        "rollout.source=dataset",
        "evaluation.benchmarks=[]",
        "placement.learner_ranks=8",
        "learner.lora.rank=8",
    ]
    settings += ["learner.zero_stage=3", "learner.precision=bf16", "placement.device=gpu"]
    shape = replace(BIG, hidden=8192, intermediate=28672, layers=80, heads=64)
    plan = make_plan(inputs_of(load_preset("demo", settings), shape, device_named("h200"), 8))
    assert [phase.name for phase in plan.fit.phases] == ["learner"]
    assert plan.advice is None
    assert (view_of(plan).kv_cache_bytes, view_of(plan).kv_cache_sequences) == (0, 0)
    text = to_text(plan, "run")
    assert "KV cache" not in text
    assert "; without evaluation, checkpoints and start-up." in text
    # On a host one sequence of 100,000 tokens would need more than the GiB of a cache that no engine has.
    long = ["model.max_length=100000", "placement.learner_ranks=1", "placement.device=cpu"]
    assert make_plan(inputs_of(load_preset("demo", settings + long), shape, device_named("cpu"))).fit.fits


def test_gpus_that_a_run_does_not_use_are_said() -> None:
    config = load_preset("demo", ["placement.device=gpu"])
    texts = [to_text(make_plan(inputs_of(config, SHAPE, GPU, num)), "run").splitlines() for num in (2, 3, 8)]
    assert [lines[0] for lines in texts] == [f"run on {num} × {GPU.name}: fits" for num in (2, 3, 8)]
    assert [line for lines in texts for line in lines if "idle" in line] == [
        f"{words} would be idle: raise placement.learner_ranks or placement.samplers." for words in ("1 GPU", "6 GPUs")
    ]


def test_the_steps_of_a_warm_start_are_said_to_be_left_out() -> None:
    plan = make_plan(inputs_of(load_preset("demo", ["warm_start.steps=30"]), SHAPE, GPU))
    assert "; without the 30 steps of warm_start, evaluation, checkpoints and start-up." in to_text(plan, "run")


def test_an_unknown_teacher_is_named_by_its_setting_and_one_that_is_known_counts() -> None:
    config = load_preset("demo", ["rollout.source=teacher", "teacher.path=org/unknown"])
    with pytest.raises(ConfigError, match=r"^teacher\.path = 'org/unknown' is not a folder here"):
        inputs_of(config, SHAPE, GPU)
    assert inputs_of(config, SHAPE, GPU, teacher=SHAPE).reference_parameters == 1448


def test_devices_are_found_by_the_names_of_ray() -> None:
    def names_of(*names: str) -> list[str]:
        cluster = ["CPU", "GPU", *(f"accelerator_type:{name}" for name in names)]
        return [device.name for device in devices_of_cluster(cluster)]

    assert names_of("H200") == ["h200-141"]
    assert names_of("H100") == ["h100-80", "h100-94"], "the name tells nothing of the memory"
    assert names_of("A100") == ["a100-40", "a100-80"]
    assert names_of("A100", "A100-80G") == ["a100-80"], "labelled by the operator"
    assert names_of() == []
    assert names_of("TPU-V4") == []
    assert names_of("H100", "L4") == names_of("H100", "TPU-V4") == [], "a cluster of two kinds has no one device"
