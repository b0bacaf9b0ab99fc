"""The JSON that says how to run: every refusal names what was given and what to do, and the
arithmetic always adds up."""

import copy
import json
from pathlib import Path

import pytest
from cost_models import BRANCHES
from refusals import not_refused, refused

from engine.config.auto import asked
from engine.config.reading import BranchesBlock, check_config, check_hardware, read_config
from engine.optimizer.clipping_rules import ClippingRule
from launch.config.blocks import READERS, balancing, weighting

FOLDER = Path(__file__).parents[2] / "ds_configs"
FILES = sorted(FOLDER.glob("*.json"))
MINIMAL = {"train_batch_size": 48, "optimizer": {"type": "AdamW", "params": {"lr": 5e-4}}}


def config(branches: dict | None = None, **keys) -> dict:
    written = copy.deepcopy(MINIMAL) | keys
    return written if branches is None else written | {"branches": branches}


def check(written: dict):
    return check_config(written, BRANCHES, READERS)


# -- the file


def test_read_config_splits_off_the_branches_block(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps(config({"layout": "merged", "gradient_clipping": {"image": 2}})))
    read, block = read_config(file, BRANCHES, READERS)
    assert read == MINIMAL
    assert block == BranchesBlock(layout="merged", gradient_clipping={"image": 2})
    none = ClippingRule("none")  # a group that is not named is not clipped
    assert block.clipping(BRANCHES) == {
        "image": ClippingRule("norm", 2.0),
        "text": none,
        "head": none,
    }


def test_clipping_is_on_unless_the_file_says_otherwise():
    on, off = (
        dict.fromkeys(("image", "text", "head"), ClippingRule(*of))
        for of in (("norm", 1.0), ("none",))
    )
    assert check(config())[1].clipping(BRANCHES) == on
    for nothing in ({}, {"image": 0, "text": 0.0, "head": {"kind": "none"}}):
        assert check(config({"gradient_clipping": nothing}))[1].clipping(BRANCHES) == off


def test_sample_weights_are_off_unless_the_file_says_otherwise():
    assert weighting(check(config())[1]) is None
    block = weighting(check(config({"sample_weights": {"use": "loss"}}))[1])
    assert (block.use, block.image, block.text, block.audio) == ("loss", 0.3, 0.7, 0.0)


def test_the_given_dictionary_stays_as_it_is():
    written = config({"layout": "fork"})
    before = copy.deepcopy(written)
    check(written)
    assert written == before


def test_a_faulty_file_is_named(tmp_path):
    file = tmp_path / "own.json"

    def read(text):
        file.write_text(text)
        read_config(file, BRANCHES, READERS)

    cases = [
        ('{"train_batch_size": 48,}', "own.json … not valid JSON … line 1"),
        ('{"train_batch_size": 48, "train_batch_size": 64}', "'train_batch_size' stands twice"),
        (
            '{"branches": {"layout": "fork", "layout": "merged"}}',
            "own.json … 'layout' stands twice",
        ),
        ("[1, 2]", "own.json … holds a list"),
        ('{"train_batchsize": 48}', "own.json … did you mean 'train_batch_size'?"),
    ]
    assert not_refused(read, cases) == []
    with pytest.raises(FileNotFoundError, match=r"zero1_fp61.*did you mean .*zero1_fp16\.json\?"):
        read_config(FOLDER / "zero1_fp61.json", BRANCHES, READERS)
    with pytest.raises(FileNotFoundError, match=r"nowhere/a\.json: no such file$"):
        read_config("nowhere/a.json", BRANCHES, READERS)


# -- what is refused


def adamw(**params):
    return {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, **params}}}


def schedule(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


REFUSED_KEYS = [
    (config(zero_optimisation={}), "'zero_optimisation' … did you mean 'zero_optimization'?"),
    (config(branch={}), "unknown key 'branch' … did you mean 'branches'?"),
    (config(xyzzy=1), "unknown key 'xyzzy' … valid keys: train_batch_size"),
    (config(wandb={"teem": "vision"}), "'wandb.teem' … did you mean 'team'?"),
    (config(tensorboard={"enabled": "perhaps"}), "tensorboard.enabled … 'perhaps'"),
    (config(comet={"samples_log_interval": "x"}), "comet.samples_log_interval … 'x'"),
    (config(amp={"enabled": True}), '\'amp\' … use "fp16" or "bf16"'),
    (config(torch_autocast={}), '\'torch_autocast\' … use "fp16" or "bf16"'),
    (config(flops_profiler={}), "'flops_profiler' … remove it"),
    (config(autotuning={}), "'autotuning' … remove it"),
    (config(elasticity={}), "'elasticity' … remove it"),
    (config(curriculum_learning={}), "'curriculum_learning' … remove it"),
    (
        config(activation_checkpointing={}),
        '\'activation_checkpointing\' … "pipeline": {"activation_checkpoint_interval": 1}',
    ),
    (config(pipeline={"stages": 2}), "'pipeline.stages' … activation_checkpoint_interval"),
    (
        config(pipeline={"activation_checkpoint_interval": -1}),
        "pipeline.activation_checkpoint_interval … number of layers",
    ),
    (
        config(pipeline={"activation_checkpoint_interval": True}),
        "pipeline.activation_checkpoint_interval … True",
    ),
]
REFUSED_BRANCHES = [
    ([], "branches: got [] … an object such as"),
    ({"micro_batchsize": 4}, "'branches.micro_batchsize' … did you mean 'micro_batch_size'?"),
    ({"xyzzy": 4}, "unknown key 'branches.xyzzy' … valid keys: layout, stages, replicas"),
    ({"layout": "forks"}, "branches.layout … 'forks' … did you mean 'fork'?"),
    ({"layout": "ring"}, "branches.layout … 'ring' … auto … fork … merged"),
    ({"layout": "chain"}, 'branches.layout … "chain" is no longer there … use fork or merged'),
    ({"schedule": "batchsync"}, "branches.schedule … 'batchsync' … did you mean 'batch_sync'?"),
    ({"schedule": "1f1b"}, "branches.schedule … '1f1b' … batch_sync"),
    ({"schedule": "zero_bubble"}, "branches.schedule … no longer there … batch_sync"),
    ({"schedule": []}, "branches.schedule … []"),
    ({"stages": 0}, "branches.stages: got 0 … whole number of at least 1"),
    ({"stages": True}, "branches.stages: got True … whole number of at least 1"),
    ({"stages": {"images": 2, "text": 1}}, "branches.stages.images' … did you mean 'image'?"),
    ({"stages": {"image": 0, "text": 1}}, "branches.stages: got {'image': 0 … of at least 1"),
    ({"stages": {"image": "auto", "text": 1}}, "branches.stages: got {'image': 'auto'"),
    ({"replicas": {"image": 1.5, "text": 1}}, "branches.replicas: got {'image': 1.5"),
    ({"replicas": True}, "branches.replicas: got True … whole number of at least 1"),
    ({"replicas": {"merged": 2}}, 'branches.replicas … write one number: "replicas": 2'),
    ({"micro_batch_size": {"merged": 8}}, 'branches.micro_batch_size … "micro_batch_size": 8'),
    ({"micro_batch_size": -3}, "branches.micro_batch_size: got -3 … whole number of at least 1"),
    ({"micro_batch_size": {"txt": 3}}, "branches.micro_batch_size.txt' … did you mean 'text'?"),
    ({"gradient_clipping": {"images": 1}}, "branches.gradient_clipping … did you mean 'image'?"),
    ({"gradient_clipping": {"head": -1}}, "branches.gradient_clipping.head … 0 means no clipping"),
    ({"gradient_clipping": {"text": True}}, "branches.gradient_clipping.text … number ≥ 0"),
    ({"max_bad_steps": 0}, "branches.max_bad_steps … got 0 … whole number of at least 1"),
    ({"max_bad_steps": True}, "branches.max_bad_steps: got True"),
    ({"communication": "gpu"}, "branches.communication … 'gpu' … host"),
    ({"layout": "merged", "balance": {"strategy": "feed"}}, 'balance: "feed" … use "deal"'),
]
REFUSED_WEIGHTS = [
    ("loss", 'branches.sample_weights: got \'loss\' … an object such as {"use": "loss"}'),
    ([], "branches.sample_weights: got [] … an object"),
    ({}, 'branches.sample_weights.use … it is "loss"'),
    ({"use": "los"}, "branches.sample_weights.use … 'los' … did you mean 'loss'?"),
    ({"use": "loss", "imgae": 1}, "'branches.sample_weights.imgae' … did you mean 'image'?"),
    ({"use": "loss", "image": -1}, "branches.sample_weights.image … a number of at least 0"),
    ({"use": "loss", "text": "much"}, "branches.sample_weights.text … a number of at least 0"),
    ({"use": "loss", "text": True}, "branches.sample_weights.text … got True"),
    ({"use": "loss", "text": float("inf")}, "branches.sample_weights.text … got inf"),
    ({"use": "loss", "image": 0, "text": 0}, "image, text, audio are all 0 … remove the block"),
    ({"use": "loss", "epochs": 3}, "branches.sample_weights.epochs … remove the key"),
    ({"use": "curriculum"}, 'branches.sample_weights.use … use "loss"'),
    ({"use": "loss", "length": "tokens"}, "branches.sample_weights.length … remove the key"),
]
REFUSED_BRANCHES += [({"sample_weights": written}, words) for written, words in REFUSED_WEIGHTS]
REFUSED_VALUES = [
    (config(zero_optimization={"stage": 4}), "zero_optimization.stage … "),
    (
        config({"stages": {"image": 2, "text": 1}}, zero_optimization={"stage": 3}),
        "stage: 3 shares out weights and gradients … one stage",
    ),
    (
        config(zero_optimization={"stage": 3}, fp16={"enabled": True}),
        'fp16 with zero_optimization.stage 3 … use "bf16"',
    ),
    (
        config(zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}}),
        "zero_optimization.offload_optimizer with stage 3 … remove the key",
    ),
    (
        config(zero_optimization={"stage": 3, "reduce_bucket_size": 1000}),
        "zero_optimization.reduce_bucket_size … remove the key",
    ),
    (
        config(zero_optimization={"stage": 3}, communication_data_type="fp16"),
        "communication_data_type: got 'fp16' … remove the key",
    ),
    (
        config(zero_optimization={"stage": 3}, memory_breakdown=True),
        "memory_breakdown: … remove the key",
    ),
    (config({"fit": "measure"}, zero_optimization={"stage": 3}), 'fit: … use "predict"'),
    (
        config(zero_optimization={"stage": 1, "round_robin_gradients": True}),
        "zero_optimization.round_robin_gradients … remove the key",
    ),
    (
        config({"stages": {"image": 2, "text": 1}}, zero_optimization={"stage": 2}),
        'stage: 2 … several stages … "stages": {"image": 2, "text": 1} … {"stage": 1}',
    ),
    (config({"stages": 3}, zero_optimization={"stage": 2}), '"stages": 3; use … one stage'),
    (
        config({"stages": {"merged": 2}}, zero_optimization={"stage": 2}),
        'stage: 2 … "stages": {"merged": 2}',
    ),
    (
        config(zero_optimization={"stage": 2}, prescale_gradients=True),
        "prescale_gradients: … ZeRO-2; remove",
    ),
    (
        config(zero_optimization={"stage": 2}, gradient_predivide_factor=2.0),
        "gradient_predivide_factor: … ZeRO-2; remove",
    ),
    (
        config(
            zero_optimization={"stage": 2},
            bf16={"enabled": True, "check_grad_overflow": False},
            data_types={"grad_accum_dtype": "fp32"},
        ),
        "bf16.check_grad_overflow: … remove the key",
    ),
    (
        config(fp16={"enabled": True}, bf16={"enabled": True}),
        "fp16 and bf16 are both enabled … enable one of them",
    ),
    (config(fp16={"enabled": True}), "fp16 with zero_optimization.stage 0 … not be scaled"),
    (config(bf16={"enabled": True}), "bf16 without … add that block"),
    (
        config(bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}),
        "bf16 with zero_optimization.stage 0 … with ZeRO-1 alone",
    ),
    (
        config(bf16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"}),
        'bf16 without … "grad_accum_dtype": "fp32"',
    ),
    (
        config(gradient_clipping=0.5),
        '"gradient_clipping": {"image": 0.5, "text": 0.5, "head": 0.5}}',
    ),
    (
        config(
            {"gradient_clipping": {"embeddings": {"match": ["text.embeddings.*"], "kind": "none"}}},
            gradient_clipping=0.5,
        ),
        '"embeddings": {"match": ["text.embeddings.*"], "kind": "norm", "limit": 0.5}}}',
    ),
    (
        config(zero_optimization={"stage": 1, "compute_grad_norm": False}),
        "zero_optimization.compute_grad_norm … remove the key",
    ),
    (config(train_batch_size=1), "train_batch_size: got 1 … at least 2"),
    (config(train_batch_size="auto"), "train_batch_size: got 'auto' … whole number"),
    (config(train_batch_size=48.0), "train_batch_size: got 48.0 … whole number"),
    ({"optimizer": {"type": "AdamW"}}, "train_batch_size: got None … at least 2"),
    ({"train_batch_size": 48}, 'no "optimizer" … "optimizer": {"type": "AdamW"'),
    (config({"gradient_clipping": 1.0}), "branches.gradient_clipping … 1.0"),
    (config(fp16=True), "fp16"),
    (config(train_micro_batch_size_per_gpu=0), "train_micro_batch_size_per_gpu … 0"),
    (config(train_micro_batch_size_per_gpu=-4), "train_micro_batch_size_per_gpu … -4"),
    (config(gradient_accumulation_steps=0), "gradient_accumulation_steps … 0"),
    (config(gradient_accumulation_steps="four"), "gradient_accumulation_steps … four"),
    (
        config(train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=2),
        "gradient_accumulation_steps",
    ),
    (config({"micro_batch_size": 8}, gradient_accumulation_steps=2), "gradient_accumulation_steps"),
    # accepted by DeepSpeed, which fails later and less clearly
    (config(wall_clock_breakdown=True), "wall_clock_breakdown"),
    (config(optimizer={}), "optimizer … type"),
    (
        config(**adamw(lr="auto", amsgrad="auto")),
        "optimizer.params.amsgrad … auto … lr, betas, eps, weight_decay only",
    ),
    (
        config(**schedule("WarmupCosineLR", total_num_steps="auto", cos_min_ratio="auto")),
        "scheduler.params.cos_min_ratio … warmup_num_steps, warmup_type, total_num_steps only",
    ),
    (
        config(bf16={"enabled": "auto"}, data_types={"grad_accum_dtype": "fp32"}),
        "bf16.enabled … auto",
    ),
]


def test_refusals_of_the_file():
    branches = [(config(written), words) for written, words in REFUSED_BRANCHES]
    assert not_refused(check, [*REFUSED_KEYS, *branches, *REFUSED_VALUES]) == []


def test_what_is_off_is_allowed():
    off = {"enabled": False}
    check(config(gradient_clipping=0, fp16=off, bf16=off, zero_optimization={"stage": 1}))


NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE = [
    *((adamw(lr=lr), "optimizer.params.lr", "above 0") for lr in ("1e-3", True, 0, -1, NAN, INF)),
    (adamw(lr=[1e-3]), "optimizer.params.lr", "above 0"),
    (adamw(lr=None), "optimizer.params.lr", "above 0"),
    *((adamw(betas=b), "optimizer.params.betas", "two") for b in (0.9, [0.9], [0.9, 1], [0, "x"])),
    (adamw(eps=0), "optimizer.params.eps", "above 0"),
    (adamw(weight_decay="0.1"), "optimizer.params.weight_decay", "at least 0"),
    (adamw(weight_decay=-0.1), "optimizer.params.weight_decay", "at least 0"),
    (adamw(amsgrad=1), "optimizer.params.amsgrad", "true or false"),
    (adamw(fused=True, foreach=True), "AdamW", "refuses"),
    ({"optimizer": {"type": "SGD", "params": {"momentum": 1}}}, "momentum", "below 1"),
    ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "SGD", "refuses"),
    ({"optimizer": {"type": "sgd"}}, "optimizer.type", "did you mean 'SGD'"),
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type", "did you mean 'Adam'"),
    ({"optimizer": {"type": "AdamW", "params": None}}, "optimizer.params", "an object"),
    ({"optimizer": {"type": 5}}, "optimizer.type", "name"),
    (schedule("WarmupLR", warmup_num_steps=-1), "warmup_num_steps", "whole number"),
    (schedule("WarmupLR", warmup_num_steps=2.0), "warmup_num_steps", "whole number"),
    (schedule("WarmupLR", warmup_num_steps=True), "warmup_num_steps", "whole number"),
    (schedule("WarmupLR", warmup_type="cosine"), "warmup_type", "linear"),
    (schedule("WarmupLR", last_batch_iteration=3), "last_batch_iteration", "unknown key"),
    (schedule("WarmupCosineLR"), "total_num_steps", '"auto"'),
    (schedule("WarmupCosineLR", total_num_steps=9, cos_min_ratio=2), "cos_min_ratio", "0 to 1"),
    (schedule("LRRangeTest", lr_range_test_step_size=0), "lr_range_test_step_size", "at least 1"),
    (schedule("OneCycle", cycle_min_lr=0, cycle_max_mom=1), "cycle_max_mom", "below 1"),
    ({"fp16": {"loss_scale": "128"}}, "fp16.loss_scale", "a number"),
    ({"fp16": {"loss_scale": NAN}}, "fp16.loss_scale", "finite"),
    ({"fp16": {"initial_scale_power": 200}}, "fp16.initial_scale_power", "127"),
    ({"fp16": {"initial_scale_power": "16"}}, "fp16.initial_scale_power", "whole number"),
    ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis", "1"),
    ({"fp16": {"enabled": "true"}}, "fp16.enabled", "true or false"),
    ({"fp16": {"fp16_master_weights_and_grads": True}}, "master_weights", "False"),
    ({"bf16": {"enabled": 1}}, "bf16.enabled", "true or false"),
    ({"data_types": {"grad_accum_dtype": "float32"}}, "grad_accum_dtype", "fp32"),
    ({"zero_optimization": {"stage": "1"}}, "zero_optimization.stage", "whole number"),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage", "whole number"),
    ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "reduce_bucket_size", "whole number"),
    ({"zero_optimization": {"overlap_comm": 1}}, "overlap_comm", "true or false"),
    ({"gradient_clipping": "1.0"}, "gradient_clipping", "at least 0"),
    ({"gradient_clipping": NAN}, "gradient_clipping", "at least 0"),
    ({"train_batch_size": True}, "train_batch_size", "at least 2"),
    ({"train_batch_size": "48"}, "train_batch_size", "at least 2"),
    ({"train_micro_batch_size_per_gpu": 2.0}, "train_micro_batch_size_per_gpu", "whole number"),
    ({"steps_per_print": 0}, "steps_per_print", "1"),
    ({"communication_data_type": "float32"}, "communication_data_type", "fp32"),
    ({"gradient_predivide_factor": 0}, "gradient_predivide_factor", "above 0"),
    ({"prescale_gradients": "yes"}, "prescale_gradients", "true or false"),
    ({"comms_logger": {"enabled": "yes"}}, "comms_logger.enabled", "true or false"),
]


def test_a_value_of_another_type_or_out_of_range_is_one_line():
    for keys, key, rule in OUT_OF_RANGE:
        with pytest.raises(ValueError) as error:
            check(config(**keys))
            pytest.fail(f"accepted: {keys}")
        said = str(error.value)
        assert key in said and rule in said and "\n" not in said, (keys, said)


def test_whole_numbers_that_are_written_as_floats_are_deepspeeds():
    """Its documentation writes 5e8."""
    zero = {"stage": 1, "reduce_bucket_size": 5e8}
    check(config(zero_optimization=zero))


def test_refusals_of_the_hardware():
    fp16, bf16 = ({key: {"enabled": True}} for key in ("fp16", "bf16"))
    with refused("fp16 is enabled … (cpu) does not compute in fp16 … ds_configs/cpu_fp32.json"):
        check_hardware(fp16, fp16_supported=False, bf16_supported=True, device="cpu")
    with refused("bf16 is enabled … (cuda) does not … ds_configs/zero1_fp32.json"):
        check_hardware(bf16, fp16_supported=True, bf16_supported=False, device="cuda")
    check_hardware(fp16, fp16_supported=True, bf16_supported=False, device="cuda")
    check_hardware(bf16, fp16_supported=False, bf16_supported=True, device="cpu")
    check_hardware(MINIMAL, fp16_supported=False, bf16_supported=False, device="cpu")
    lion = {**MINIMAL, "optimizer": {"type": "Lion"}}
    with refused("optimizer.type 'Lion' … GPUs only"):
        check_hardware(lion, fp16_supported=False, bf16_supported=True, device="cpu")
    check_hardware(lion, fp16_supported=True, bf16_supported=True, device="cuda")
    assert {"cpu_fp32.json", "zero1_fp32.json"} <= {file.name for file in FILES}


# -- the files we ship


def test_file_names_tell_the_truth():
    stages = {"zero2": 2, "zero3": 3}
    for file in FILES:
        (read, block), name = read_config(file, BRANCHES, READERS), file.stem
        enabled = [key for key in ("fp16", "bf16") if read.get(key, {}).get("enabled")]
        assert (enabled or ["fp32"])[0] in name.split("_"), name
        assert read["zero_optimization"]["stage"] == stages.get(name[:5], 1), name
        kinds = ("zero1", *stages, "cpu", "muon", "lit", "lora", "fork", "pipeline", "feed")
        assert name.startswith(tuple(f"{kind}_" for kind in kinds)), name
        is_fork = any(word in name for word in ("fork", "pipeline", "feed"))
        assert is_fork == (block.layout == "fork"), name
        assert ("feed" in name) == (balancing(block).strategy == "feed"), name
        assert ("offload" in name) == ("offload_optimizer" in read["zero_optimization"]), name
        assert ("lit" in name) == bool(block.locking()), name
        assert ("muon" in name) == (read["optimizer"]["type"] == "Muon"), name
        of_branches = ("branches.gradient_clipping", "branches.optimizer_groups")
        by_recipe = {"optimizer.params.lr", "scheduler.params.warmup_num_steps", *of_branches}
        assert by_recipe <= set(asked(read, block)), name
