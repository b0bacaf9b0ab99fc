"""No line of shell evaluates, writes or reads what comes from a run's folder, which may be another
one's work. What needs that is Python (`launch/run/supervise.py`), where files are written by
`common/files.py` and what they hold is taken in one form only."""

import ast
import re

import pytest
from forked_script import ROOT

from launch.run import hosts
from launch.tools import doctor, submit

FOLDERS = (".ci", "bench", "common", "data", "docs", "engine", "examples", "launch", "models")
# of a command: at the beginning of a line, or behind what begins another one
AT = r"(?:^|[;&|({!]|\b(?:then|do|else|if|while|until)\s|\$\()\s*"
RULES = {
    # arithmetic evaluates subscripts in the values of its variables, also within [[ ]]
    "evaluates": re.compile(
        r"\(\(|\[\[[^]]*\s-(?:eq|ne|lt|le|gt|ge)\s|\$\[|\$\{!|\$\{\w+\[[^]]*\$|printf\s+-v"
        rf"|{AT}(?:eval|let|declare|typeset|source|\.|trap)\s|\b(?:sh|bash)\s+-c\b|\s-c\s+\"[^\"]*\$"
    ),
    "writes": re.compile(
        rf">|{AT}(?:mkdir|cp|mv|rm|rmdir|ln|tee|touch|install\s-\S+|dd|truncate|mktemp|chmod|sed\s+-i)\s"
    ),
    "reads": re.compile(
        r"<(?!=)"
        rf"|{AT}(?:cat|head|tail|grep|sed|awk|cut|cksum|read|mapfile|readarray|find|ls|stat|wc)\s"
    ),
}
# What does so and has nothing of a run's folder in it: (file, part of the line) -> why.
OWN = "this script's own folder"
ENVIRONMENT = "the environment that the user has named or setup.sh has made"
ALLOWED = {
    ("launch/quickstart.sh", 'source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"'): OWN,
    ("launch/test.sh", 'source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"'): OWN,
    ("launch/setup.sh", 'mkdir -p "$(dirname "$environment")"'): "the user's own cache",
    ("launch/setup.sh", 'wanted="$(cat "$root"/requirements*.txt | cksum)"'): OWN,
    ("launch/setup.sh", 'packages="$(grep -c '): OWN,
    ("launch/setup.sh", 'environment="$HOME/.cache/wye/venv-$(printf %s "$root" | cksum'): OWN,
    ("launch/setup.sh", 'if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]'): ENVIRONMENT,
    ("launch/setup.sh", 'echo "$wanted" >"$stamp"'): ENVIRONMENT,
    ("submit.ALONE", "$((20000 + RANDOM % 12000))"): "a number of bash's own",
    ("submit.SLURM", "trap 'asked=yes; kill -USR1 \"$job\" 2>/dev/null' USR1 TERM INT"): "its text",
    ("submit.FIRST", "awk '!/^#/ && NF {{ print $1; exit }}' {hostfile}"): "the user's own file",
    ("hosts.COUNT", 'grep -c "^GPU "'): "what nvidia-smi says",
    ("doctor.GUARD", "exec 3<&0"): "what has started it",
    ("doctor.GUARD", "<&3 >/dev/null"): "what has started it",
}


def lines_of(text):
    """Whole commands without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        code = re.sub(r"(^|\s)#.*", "", line).strip()
        if code:
            yield code


def broken_by(line):
    """The rules that a line breaks. What is in single quotes is data, and what leads to /dev/null or
    another stream of the script is no file."""
    bare = re.sub(r"'[^']*'", "''", line)
    bare = re.sub(r"[0-9&]?>>?\s*(?:/dev/null|&[0-9-])|</dev/null", "", bare)
    return [name for name, rule in RULES.items() if rule.search(bare)]


def shell_texts():
    """By name: the files of shell, and what Python gives to one."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_file() and file.suffix in ("", ".sh"):
                text = file.read_text(encoding="utf-8", errors="replace")
                if file.suffix or re.match(r"#!.*sh\b", text):
                    yield str(file.relative_to(ROOT)), text
    for name in ("SCRIPT", "ALONE", "SEED", "SLURM", "MPI", "FIRST", "POD"):
        yield f"submit.{name}", getattr(submit, name)
    yield "hosts.COUNT", hosts.COUNT
    yield "doctor.GUARD", doctor.GUARD


def test_no_line_touches_what_lies_in_a_runs_folder():
    found = {
        (name, line, rule)
        for name, text in shell_texts()
        for line in lines_of(text)
        for rule in broken_by(line)
    }
    allowed = {
        each: key for each in found for key in ALLOWED if key[0] == each[0] and key[1] in each[1]
    }
    assert found == allowed.keys(), "read and write by Python, or say in ALLOWED why not"
    assert {*allowed.values()} == ALLOWED.keys(), "what is not there any more leaves the list"


def test_every_file_of_shell_is_looked_at():
    names = {name for name, _ in shell_texts()}
    assert {".ci/run", "bench/first_hour.sh"} < names
    assert {f"launch/{each}.sh" for each in ("quickstart", "setup", "supervise", "test")} < names


# of supervise.sh when it was of bash: the name of the newest checkpoint ran as a program, and files
# were written through links
BEFORE = """
newest() { cat "$run_dir/checkpoints/latest" 2>/dev/null || echo none; }
trained() { tail -n 1 "$run_dir/metrics.jsonl" 2>/dev/null | grep -o '[0-9]*$' || echo 0; }
[ "$from" = none ] && from=0 || from=$((10#$from))
[[ "$step" -gt "$from" ]] || continue
echo "1 localhost $gpus $(sh -c "$counting")"
mkdir -p "$run_dir" && printf '%s\\n' "$chosen" >"$run_dir/hosts" || exit 1
mkdir -p "$run_dir"
: >"$run_dir/stop"
rm -f "$run_dir/stop"
done <"$hostfile"
lost=${counts[$step]}
eval "$command"
. "$run_dir/environment"
python -c "print($step)"
"""


@pytest.mark.parametrize("line", lines_of(BEFORE))
def test_a_line_that_does_is_found(line):
    assert broken_by(line)


def test_python_starts_a_shell_in_few_places_with_words_of_its_own():
    """Each of them gives a text that is scanned above, and what others say as arguments of it."""
    found = set()
    for folder in ("common", "data", "models", "engine", "launch"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    given = {word.arg for word in node.keywords}
                    name = ast.unparse(node.func)
                    assert "shell" not in given and name not in ("os.system", "os.popen"), file
                if isinstance(node, ast.List) and any(
                    isinstance(each, ast.Constant) and each.value in ("sh", "bash")
                    for each in node.elts
                ):
                    found.add(str(file.relative_to(ROOT)))
    assert found == {"launch/run/hosts.py", "launch/tools/doctor.py", "launch/tools/submit.py"}
