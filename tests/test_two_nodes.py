"""train.py on two nodes, as DeepSpeed's launcher starts it there with pdsh and ssh."""

import os

import pytest
from launched import (
    SMALL,
    command,
    finish,
    fork_flags,
    launcher,
    metrics,
    reached,
    run_to_end,
    wait_for,
    write_pairs,
)
from nodes import lacking, nodes, plug, reached_by_ssh

STEPS = 12


@pytest.mark.skipif(
    lacking("ssh", "ssh-keygen", "sshd", "pdsh") is not None,
    reason=str(lacking("ssh", "ssh-keygen", "sshd", "pdsh")),
)
def test_a_run_over_two_nodes_whose_cable_is_pulled(tmp_path, monkeypatch):
    """Both nodes end and one says why; the same command goes on from the newest checkpoint, and
    the losses are those of one node."""
    arguments = [*SMALL, *fork_flags(tmp_path), "--data", write_pairs(tmp_path / "pairs", 320)]
    arguments += ["--max-text-tokens", 16, "--steps", STEPS, "--save-every", 3, "--workers", 0]
    monkeypatch.setenv("HOLD_AFTER", "4")
    run_dir, keys = tmp_path / "two", tmp_path / "ssh"
    keys.mkdir()
    run_dir.mkdir()
    (run_dir / "hold").touch()
    passed_on = {"GLOO_SOCKET_IFNAME": "eth0", "HOLD_AFTER": "4"}
    passed_on |= {
        name: value
        for name, value in os.environ.items()
        if name in ("DS_ACCELERATOR", "OMP_NUM_THREADS", "TORCH_EXTENSIONS_DIR", "WYE_CACHE")
        or name.startswith("WANDB_")
    }
    (tmp_path / "env").write_text("".join(f"{k}={v}\n" for k, v in passed_on.items()))
    with nodes(2) as made, reached_by_ssh(made, keys) as wrapped:
        monkeypatch.setenv("PATH", f"{wrapped}:{os.environ['PATH']}")
        monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "env"))
        (tmp_path / "hosts").write_text("".join(f"{n.address} slots=1\n" for n in made))

        def run():
            return command(
                lambda port: made[0].command(
                    *over_hosts(launcher(2, port, "tests/held_training.py"), tmp_path / "hosts"),
                    *map(str, arguments),
                    "--run-dir",
                    str(run_dir),
                )
            )

        first = run()
        wait_for(reached(run_dir, 4), first)
        plug(made, 1, connected=False)
        status, output = finish(first)
        assert status != 0
        assert "rank 1 (text 0, replica 0) gave no sign of life for 40 s" in output, output[-5000:]
        plug(made, 1, connected=True)
        (run_dir / "hold").unlink()
        status, output = finish(run())
    assert status == 0 and "2 ranks on 2 nodes" in output, output[-5000:]
    one_dir = tmp_path / "one"
    status, output = run_to_end("train.py", *arguments, "--run-dir", one_dir, ranks=2)
    assert status == 0, output[-5000:]
    two, one = (
        [line["loss"] for _, line in sorted(metrics(folder).items())]
        for folder in (run_dir, one_dir)
    )
    # a rank alone on its node has more threads, whose sums come in another order
    assert len(two) == STEPS and two == pytest.approx(one, rel=1e-3)


def over_hosts(words: list[str], hosts: object) -> list[str]:
    """A launcher's command with a file of hosts instead of a number of ranks."""
    where = words.index("--num_gpus")
    return [*words[:where], "--hostfile", str(hosts), *words[where + 2 :]]
