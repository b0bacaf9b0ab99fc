"""One file knows what is inside DeepSpeed."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BACKEND = "engine/backend/deepspeed.py"
# its instructions and the models of its keys, which are what they are
OTHERS = {"engine/schedule.py", "engine/config/deepspeed_keys.py"}
# names of DeepSpeed's that begin with no underscore, and of which nobody else need know
INSIDE = (
    r"bf16_groups|fp32_groups_\w+|averaged_gradients|update_[lh]p_\w+|clear_lp_grads|loss_scaler"
    r"|basic_optimizer|cur_scale|get_hp_fragment_address|lp_fragment_address|immediate_grad_update"
    r"|setup_buckets|ipg_buckets|reduce_ready_partitions\w+|overlapping_partition\w+|finalize_gradient\w+"
)
PRIVATE = r"_hp_mapping|_grad_acc_hooks|_hp_param|_hp_grad|_exec_\w+|_running_engine_\w+|_take_model_step|ds_pipe\w+"


def files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    code = ("common/", "data/", "engine/", "launch/", "models/", "train.py", "evaluate.py")
    return [file for file in listed.stdout.split() if file.startswith(code)]


def imports_of(text: str) -> set[str]:
    """The modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def test_one_file_knows_what_is_inside_deepspeed():
    runtime, inside = set(), []
    for file in files():
        text = (ROOT / file).read_text()
        if any(name.startswith("deepspeed.runtime") for name in imports_of(text)):
            runtime.add(file)
        attributes = re.findall(rf"[\w\])]\.({INSIDE}|{PRIVATE})\b", text)
        if attributes and file != BACKEND:
            inside.append((file, sorted(set(attributes))))
    assert runtime == {BACKEND, *OTHERS}
    assert inside == []


def test_what_is_looked_for_is_there():
    """Of the names above, those that the backend uses today: else nothing would be found."""
    text = (ROOT / BACKEND).read_text()
    used = set(re.findall(rf"[\w\])]\.({INSIDE}|{PRIVATE})\b", text))
    assert len(used) >= 10, used


def test_a_stage_module_has_few_attributes_of_its_own():
    from engine import module
    from engine.backend import deepspeed

    def assigned(of) -> set[str]:
        return set(
            re.findall(r"self\.(\w+)(?:: [^=]+)?(?:, self\.\w+)* = ", Path(of.__file__).read_text())
        )

    assert len(assigned(module) - assigned(deepspeed)) <= 20
