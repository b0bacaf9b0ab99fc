"""ds_configs/README.md tells the truth: its snippets are accepted, come out as it says, and no key
is missing from its tables."""

import json
import re
from pathlib import Path

import pytest
from cost_models import BRANCHES, proportional

from engine.build import deepspeed_config
from engine.config.deepspeed_keys import DEEPSPEED_KEYS
from engine.config.reading import (
    NOT_WITH_A_PIPELINE,
    BranchesBlock,
    check_config,
    read_config,
)
from engine.planning.planner import plan_run
from launch.config.blocks import READERS, BalanceBlock

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "ds_configs" / "README.md").read_text(encoding="utf-8")
MINIMAL = {"train_batch_size": 48, "optimizer": {"type": "AdamW", "params": {"lr": 5e-4}}}
COSTS = proportional({"image": [3.0] * 4, "text": [1.0] * 4})  # "an image costs three times a text"

# A snippet, and the line of four spaces below it that says what comes out, if there is one.
SNIPPETS = re.findall(
    r"```json\n(.*?)```\n(?:\n    ((?:fork|merged): [^\n]*)\n)?", PAGE, flags=re.DOTALL
)
EXAMPLES = [(text, result) for text, result in SNIPPETS if result]


def test_the_page_has_snippets():
    assert len(SNIPPETS) == PAGE.count("```json") >= 8 and len(EXAMPLES) >= 7


@pytest.mark.parametrize("text", [text for text, _ in SNIPPETS])
def test_snippets_are_accepted(text):
    check_config(MINIMAL | json.loads(text), BRANCHES, READERS)


@pytest.mark.parametrize("text, result", EXAMPLES)
def test_examples_come_out_as_the_page_says(text, result):
    described, dealt = re.split(r" {2,}", result)
    read, block = check_config(MINIMAL | json.loads(text), BRANCHES, READERS)
    plan = plan_run(read, block, sum(map(int, re.findall(r"×(\d+)", described))), COSTS)
    assert plan.graph.describe() == described
    batches = {
        branch: (batch.micro_batch_size, batch.num_micro_batches, batch.replicas)
        for branch, batch in plan.batches.items()
    }
    assert (
        ", ".join(
            f"{branch} {'' if plan.batches[branch].is_even else '≤'}{micro} × {number} × {replicas}"
            for branch, (micro, number, replicas) in batches.items()
        )
        == dealt
    )
    for branch, (micro, number, replicas) in batches.items():
        even, size = plan.batches[branch].is_even, read["train_batch_size"]
        assert micro * number * replicas == size if even else micro * number * replicas > size
        assert (
            deepspeed_config(read, plan.batches[branch], 10)["train_micro_batch_size_per_gpu"]
            == micro
        )


FILES = re.findall(
    r"^`(\w+\.json)`: .*?\n\n    ((?:fork|merged): [^\n]*)\n",
    PAGE,
    flags=re.DOTALL | re.MULTILINE,
)


def test_the_files_with_arithmetic_come_out_as_the_page_says():
    assert [name for name, _ in FILES] == ["fork_bf16.json", "pipeline_bf16.json", "feed_bf16.json"]
    for name, result in FILES:
        described, dealt = re.split(r" {2,}", result)
        config, block = read_config(ROOT / "ds_configs" / name, BRANCHES, READERS)
        plan = plan_run(config, block, 8, COSTS)
        assert plan.graph.describe() == described
        batches = {
            branch: (batch.micro_batch_size, batch.num_micro_batches, batch.replicas)
            for branch, batch in plan.batches.items()
        }
        assert (
            ", ".join(
                f"{branch} {micro} × {number} × {replicas}"
                for branch, (micro, number, replicas) in batches.items()
            )
            == dealt
        )


def rows(section: str) -> str:
    """The first cells of the tables of a section, those of its subsections left out."""
    (body,) = re.findall(
        rf"^###? {re.escape(section)}\n(.*?)(?=^###? |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE
    )
    return "\n".join(line.split("|")[1] for line in body.splitlines() if line.startswith("|"))


def test_the_tables_have_every_key_and_no_other():
    assert re.findall(r"`(\w+)`", rows("`branches`")) == list(BranchesBlock.__dataclass_fields__)
    assert re.findall(r"`(\w+)`", rows("`balance`")) == list(BalanceBlock.__dataclass_fields__)
    assert set(re.findall(r"`(\w+)`", rows("DeepSpeed's keys"))) == set(DEEPSPEED_KEYS)
    assert all(f"`{key}`" in PAGE for key in NOT_WITH_A_PIPELINE)


def test_the_table_has_every_file():
    assert {name for name in re.findall(r"`(\w+\.json)`", PAGE)} == {
        file.name for file in (ROOT / "ds_configs").glob("*.json")
    }


@pytest.mark.parametrize("page", ["ds_configs/README.md", "engine/README.md"])
def test_the_files_a_page_names_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in re.findall(
        r"\b(?:tests|engine|launch|models|data|ds_configs|bench)/[\w/]+\.(?:py|json|md|sh)\b", text
    ):
        assert (ROOT / path).is_file(), path
    for name in re.findall(r"\b(?:tests/[\w/]+\.py)::(\w+)", text):
        assert any(
            f"def {name}(" in file.read_text(encoding="utf-8")
            for file in (ROOT / "tests").rglob("test_*.py")
        ), name
