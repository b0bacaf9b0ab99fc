"""Writes, and on request submits, the job of a run on a cluster.

python -m launch.tools.submit --cluster slurm --nodes 4 --gpus 8 -- --run-dir /shared/long OPTIONS
python -m launch.tools.submit --cluster mpi --hostfile HOSTS -- --run-dir /shared/long OPTIONS
python -m launch.tools.submit --cluster kubernetes --nodes 2 --gpus 8 --image IMAGE --claim CLAIM \
    --mount /shared -- --run-dir /shared/long OPTIONS
python -m launch.tools.submit --cluster local --gpus 8 -- --run-dir runs/long OPTIONS

The code as it is now goes to RUN_DIR/code, so that a run that is queued, or goes on later, is not
changed by later edits; code that is there already is kept where this tool has copied it, or with
--trust-run. The job is a file beside it. Jobs are `supervise.sh` around a launcher: they
start a failed run again, and end with a checkpoint when they are asked to. Those for Slurm and MPI
are shell scripts that also run under `bash`, on one machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.command_line import CommandParser
from common.files import refuse_link, write_text
from common.options import at_least
from common.output import UNSHOWN, outlive_output
from common.secrets import redact
from data.formats.specs import has_options, is_remote, local_path
from launch.config.options import make_parser as make_train_parser
from launch.config.options import parse_options
from launch.run.hosts import NAME
from launch.tools.command import run_tool
from launch.tools.kept_code import GIVEN, keep_code

CLUSTERS = ("slurm", "kubernetes", "mpi", "local")
OF_PATTERNS = ("webdataset", "stream", "parquet")
OF_TWO = (
    "coco",
    "vg",
    "refcoco",
    "flickr30k-entities",
)  # a folder of images, and what tells of them
OF_ONE = (
    "jsonl",
    "csv",
    "tsv",
    "karpathy",
    "imagefolder",
    "audiofolder",
    "videofolder",
    "subtitles",
)
SUBMITTED_BY = {"slurm": ["sbatch"], "kubernetes": ["kubectl", "apply", "-f"]}

SCRIPT = """\
#!/usr/bin/env bash
{header}# Written by launch.tools.submit. `bash` runs it, too, on one machine.
set -uo pipefail
# of another launcher, where this was submitted: Slurm gives a job the variables of that shell
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
cd {here} || exit 2
run_dir={run_dir}
{seed}train=({code}/train.py {options} --run-dir "$run_dir")
supervise=(env PYTHON={python} bash {code}/launch/supervise.sh --restarts {restarts} --)
{accelerator}{start}"""
ALONE = """\
exec "${{supervise[@]}}" {python} -m deepspeed.launcher.runner --hostfile /dev/null \\
    --num_gpus {gpus} --master_port $((20000 + RANDOM % 12000)) "${{train[@]}}"
"""
SEED = """\
seed=${SLURM_ARRAY_TASK_ID:-0}
run_dir=$run_dir/seed-$seed
"""
SLURM_HEADER = """\
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}
#SBATCH --cpus-per-task={cpus}
{of_gpus}#SBATCH --signal=B:USR1@{before}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={log}
{more}"""
SLURM = """\
if [ -z "${{SLURM_JOB_ID:-}}" ]; then
    {alone}fi
# sbatch says it to itself only
[ -z "${{SLURM_CPUS_PER_TASK:-}}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
"${{supervise[@]}}" srun --kill-on-bad-exit=0 --wait=60 {python} "${{train[@]}}" &
job=$! asked="" status=127
# before the time is over, Slurm sends SIGUSR1: the run saves, and the job is queued again
trap 'asked=yes; kill -USR1 "$job" 2>/dev/null' USR1 TERM INT
while true; do # a signal ends `wait`, not the job
    asked=""
    wait "$job"; code=$?
    [ "$code" -eq 127 ] || status=$code # 127: it was waited for already
    [ -n "$asked" ] || break
done
[ "$status" -ne 75 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
"""
MPI = """\
{first}passed=() # mpirun takes no variable to other hosts that is not named
for name in $(compgen -e); do
    case $name in
        CUDA_VISIBLE_DEVICES) ;; # of this host
        PATH | LD_LIBRARY_PATH | PYTHON* | MASTER_* | TORCH* | CUDA_* | NCCL_* | GLOO_* | OMP_* \\
            | DS_* | WYE_* | WANDB_* | HF_* | TOKENIZERS_* | TMPDIR | *_proxy) passed+=(-x "$name") ;;
    esac
done
# no binding: it would give all threads of a rank one core
exec "${{supervise[@]}}" mpirun {where} --bind-to none "${{passed[@]}}" {python} "${{train[@]}}"
"""
FIRST = """\
MASTER_ADDR=$(awk '!/^#/ && NF {{ print $1; exit }}' {hostfile})
export MASTER_ADDR
"""
# agents that share their store keep it when another pod takes the place of one (torch 2.14)
POD = """\
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec bash {code}/launch/supervise.sh --restarts {restarts} -- \
{python} -m torch.distributed.run {code}/train.py {options} --run-dir {run_dir}"""
KUBERNETES = """\
# Written by launch.tools.submit. `kubectl delete` of the job ends it with a checkpoint.
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {name}
spec:
  nprocPerNode: "{gpus}"
  elasticPolicy:
    rdzvBackend: c10d
    minReplicas: {nodes}
    maxReplicas: {nodes}
  runPolicy:
    backoffLimit: {restarts}
  pytorchReplicaSpecs:
    Worker:
      replicas: {nodes}
      restartPolicy: OnFailure
      template:
        spec:
          terminationGracePeriodSeconds: {before}
          containers:
            - name: pytorch
              image: {image}
              workingDir: {here}
              command: {command}
{of_gpus}              volumeMounts:
                - name: shared
                  mountPath: {mount}
                - name: shm
                  mountPath: /dev/shm
          volumes:
            - name: shared
              persistentVolumeClaim:
                claimName: {claim}
            - name: shm
              emptyDir:
                medium: Memory
"""


LIMITS = """\
              resources:
                limits:
                  nvidia.com/gpu: {gpus}
"""


CPUS = 8  # cores of a rank with a GPU: loader processes, threads of the step, NCCL's proxy

# name, its kind, default, help
FLAGS: tuple[tuple[str, Callable[[str], Any], Any, str], ...] = (
    ("nodes", at_least(1), 1, "(default: 1)"),
    ("gpus", at_least(1), None, "ranks of each node; each has a GPU, without --cpu"),
    ("cpus", at_least(1), None, "slurm: cores of each rank (default: 8, with --cpu 1)"),
    ("hostfile", Path, None, "mpi: a line such as `node1 slots=8` for each host"),
    ("seeds", at_least(1), None, "slurm: an array of so many runs, RUN_DIR/seed-0 and so on"),
    ("image", str, None, "kubernetes: with the packages of requirements.txt"),
    ("claim", str, None, "kubernetes: the PersistentVolumeClaim with RUN_DIR and the data"),
    ("mount", Path, None, "kubernetes: where it is, in the pods and here"),
    ("before", at_least(1), 300, "seconds to save in, before the time is over (default: 300)"),
    ("restarts", int, 3, "after failures in a row without a new checkpoint (default: 3)"),
    ("name", str, None, "of the job (default: the name of RUN_DIR)"),
    ("python", str, None, "that runs train.py (default: this one; kubernetes: python)"),
)


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m launch.tools.submit",
        usage="python -m launch.tools.submit --cluster CLUSTER [FLAGS] -- OPTIONS of train.py",
        description=(__doc__ or "").split("\n", 1)[0],
    )
    parser.add_argument("--cluster", choices=CLUSTERS, required=True)
    parser.add_argument(
        "--submit", action="store_true", help="also submit it; start it (mpi, local)"
    )
    about = 'slurm: further options, such as --sbatch="--time=8:00:00 -p gpu"; may be repeated'
    parser.add_argument("--sbatch", action="append", metavar="…", help=about)
    about = "ranks run on CPUs (default: on GPUs; local, and mpi without --hostfile: as "
    about += "DS_ACCELERATOR says here)"
    parser.add_argument("--cpu", action="store_true", help=about)
    about = "the data are on the nodes alone: do not look for them here"
    parser.add_argument("--data-on-nodes", action="store_true", help=about)
    about = (
        "run RUN_DIR/code as it is, whoever made it (default: only code that this tool has copied)"
    )
    parser.add_argument("--trust-run", action="store_true", help=about)
    for name, kind, default, text in FLAGS:
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="…", help=text)
    parser.add_argument("options", nargs="*", help="of train.py, after `--`; with --run-dir")
    return parser


def main(arguments: argparse.Namespace) -> None:
    known, options = _read(arguments)
    run_dir = Path(known.run_dir).absolute()
    for log in run_dir.glob("slurm-*.log"):
        refuse_link(log)  # Slurm would write through it
    code = keep_code(run_dir / "code", arguments.trust_run)
    for flag in ("deepspeed_config", "recipe"):
        given = getattr(known, flag)
        if given and Path(given).is_file():
            copy = code / f"{GIVEN}{Path(given).name}"
            write_text(copy, Path(given).read_text(encoding="utf-8"))
            given = copy
        options += [f"--{flag}", str(given)] if given else []
    job = run_dir / ("job.yaml" if arguments.cluster == "kubernetes" else "job.sh")
    write_text(job, job_text(arguments, run_dir, options))
    print(job)
    if arguments.submit:
        words = [*SUBMITTED_BY.get(arguments.cluster, ["bash"]), str(job)]
        try:
            sys.exit(subprocess.run(words).returncode)
        except FileNotFoundError as error:
            raise OSError(f"{words[0]} is not installed here; submit {job} elsewhere") from error


def _read(arguments: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """What of train.py's options this tool deals with, and the other ones. Errors: ValueError."""
    cluster = arguments.cluster
    of_slurm = ((name, "slurm") for name in ("seeds", "sbatch", "cpus"))
    for name, of in (("hostfile", "mpi"), *of_slurm):
        if getattr(arguments, name) and cluster != of:
            raise ValueError(f"--{name} is for --cluster {of}; leave it out")
    if arguments.gpus is None and not arguments.hostfile:
        raise ValueError("--gpus is missing: how many ranks each node gets")
    if arguments.nodes > 1 and cluster in ("local", "mpi"):
        raise ValueError("--nodes: --cluster local is one machine, and mpi takes --hostfile")
    if arguments.hostfile:
        _check_hosts(arguments.hostfile)
    given = make_train_parser().words(arguments.options)
    parser = CommandParser(prog="python -m launch.tools.submit", add_help=False, allow_abbrev=False)
    for flag in ("--run-dir", "--deepspeed_config", "--recipe", "--seed"):
        parser.add_argument(flag)
    known, others = parser.parse_known_args(given)
    if known.run_dir is None:
        raise ValueError("the options of train.py have no --run-dir; add it, after `--`")
    for flag, value in (
        ("--run-dir", known.run_dir),
        *(("--sbatch", s) for s in arguments.sbatch or ()),
    ):
        if UNSHOWN.search(value) or "\n" in value:
            raise ValueError(
                f"{flag} {value!r}: holds a line break or another control character, and what follows "
                "it would be a line of the job; leave it out"
            )
    if known.seed is not None:
        others += ["--seed", known.seed]
    if arguments.seeds and any(re.match("(--)?seed\\b", word) for word in others):
        raise ValueError("--seeds gives each run its seed; leave --seed out")
    if cluster == "kubernetes":
        if not (arguments.image and arguments.claim and arguments.mount):
            raise ValueError("--cluster kubernetes needs --image, --claim and --mount")
        if not Path(known.run_dir).absolute().is_relative_to(arguments.mount):
            raise ValueError(
                f"--run-dir {known.run_dir}: pods share --mount {arguments.mount} only; give a "
                "folder below it"
            )
    options = parse_options(given)  # what is wrong is better seen before the queue
    if not arguments.data_on_nodes:
        for spec in filter(None, (*options.data, options.val_data)):
            _look_for(spec, arguments.mount if cluster == "kubernetes" else None)
    return known, others


def _check_hosts(file: Path) -> None:
    """Raise ValueError for a name that mpirun would pass to ssh as an option, and for no file."""
    if not file.is_file():
        raise ValueError(f"--hostfile {file}: there is no such file")
    lines = file.read_text(encoding="utf-8").splitlines()
    for name in (line.split()[0] for line in lines if line.partition("#")[0].strip()):
        if not NAME.fullmatch(name):
            raise ValueError(
                f"--hostfile {file}: {name[:80]!r} is no name of a host; write lines such as `node1 "
                "slots=8`"
            )


def _look_for(spec: str, mount: Path | None) -> None:
    """Say what of a data set cannot be looked for here. `mount`: what pods see of this machine.
    Errors: ValueError for what is not there."""
    for path in paths_of(spec):
        if is_remote(path):
            print(f"{redact(path)}: remote, not looked for", file=sys.stderr)
        elif mount and not Path(local_path(path)).is_relative_to(mount):
            print(
                f"{path}: not below --mount {mount}, so pods see it only if it is in the image; not "
                "looked for",
                file=sys.stderr,
            )
        elif not Path(local_path(path)).exists():
            raise ValueError(
                f"data spec '{redact(spec)}': {local_path(path)} is not there; give what all nodes "
                "see, or --data-on-nodes where this machine does not see it"
            )


def paths_of(spec: str) -> list[str]:
    """Files and folders that a data spec needs; of patterns the folders above."""
    kind, _, where = spec.partition(":")
    if has_options(kind, where):
        where = where.rpartition("?")[0]
    if kind in OF_PATTERNS:
        parts = where.split("::")
        return [
            part if is_remote(part) else re.split(r"[^/]*[{*?\[]", part)[0] or "."
            for part in filter(None, parts)
        ]
    if kind in OF_TWO:
        return [part for part in where.rpartition(":")[::2] if part]
    return [where] if kind in OF_ONE else []


def runs_on_cpu(arguments: argparse.Namespace) -> bool:
    """Whether ranks are to use no GPU. DS_ACCELERATOR is of this machine, which may be a login node
    without one."""
    here = os.environ.get("DS_ACCELERATOR") == "cpu"
    if arguments.cluster == "local" or (arguments.cluster == "mpi" and not arguments.hostfile):
        return arguments.cpu or here
    if here and not arguments.cpu:
        print(
            "DS_ACCELERATOR=cpu is of this machine, and the job is for GPUs; give --cpu for ranks on "
            "CPUs",
            file=sys.stderr,
        )
    return arguments.cpu


def job_text(arguments: argparse.Namespace, run_dir: Path, options: list[str]) -> str:
    """Of the job's file. `options`: of train.py, but for --run-dir."""
    cluster, on_cpu = arguments.cluster, runs_on_cpu(arguments)
    python = arguments.python or ("python" if cluster == "kubernetes" else sys.executable)
    quoted = {
        "code": run_dir / "code",
        "run_dir": run_dir,
        "here": Path.cwd(),
        "python": python,
        "log": run_dir / "slurm-%j.log",
        "hostfile": arguments.hostfile and arguments.hostfile.absolute(),
    }
    name = re.sub("[^a-z0-9]+", "-", (arguments.name or run_dir.name).lower()).strip("-")
    values = vars(arguments) | {each: shlex.quote(str(value)) for each, value in quoted.items()}
    values |= {"name": name[:50] or "wye", "options": shlex.join(options)}
    if cluster == "kubernetes":
        accelerator = "export DS_ACCELERATOR=cpu; " if on_cpu else ""
        # Kubernetes itself reads $(NAME) and $$ of a command
        command = ["bash", "-c", (accelerator + POD.format(**values)).replace("$", "$$")]
        plain = {"image": arguments.image, "mount": str(arguments.mount), "claim": arguments.claim}
        plain |= {"here": str(Path.cwd()), "command": command}
        of_gpus = "" if on_cpu else LIMITS.format(**values)
        written = {key: yaml_text(value) for key, value in plain.items()}
        return KUBERNETES.format(**values | written, of_gpus=of_gpus)
    values |= {"header": "", "seed": "", "first": "", "where": f"-np {arguments.gpus}"}
    values["accelerator"] = "export DS_ACCELERATOR=cpu\n" if on_cpu else "unset DS_ACCELERATOR\n"
    start = values["alone"] = ALONE.format(**values)
    if cluster == "slurm":
        array = f"--array=0-{arguments.seeds - 1} " if arguments.seeds else ""
        more = [array, *(arguments.sbatch or ())]
        values["more"] = "".join(f"#SBATCH {each.strip()}\n" for each in more if each.strip())
        # Slurm gives a task one core where nothing is said
        values["cpus"] = arguments.cpus or (1 if on_cpu else CPUS)
        values["of_gpus"] = "" if on_cpu else f"#SBATCH --gpus-per-node={arguments.gpus}\n"
        values["header"], start = SLURM_HEADER.format(**values), SLURM.format(**values)
        if arguments.seeds:
            values["seed"] = SEED
            values["options"] += ' --seed "$seed"'
    elif cluster == "mpi":
        if arguments.hostfile:
            values["where"] = f"--hostfile {values['hostfile']}"
            values["first"] = FIRST.format(**values)
        start = MPI.format(**values)
    return SCRIPT.format(**values, start=start)


def yaml_text(value: str | list[str]) -> str:
    """Quoted for YAML. As JSON it would have pairs of escapes for characters such as emoji, which
    not every reader of YAML takes."""
    if isinstance(value, list):
        return f"[{', '.join(map(yaml_text, value))}]"
    plain = (c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
    return f'"{"".join(plain)}"'


def run(arguments: list[str] | None = None) -> int:
    return run_tool(make_parser(), main, arguments)


if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
