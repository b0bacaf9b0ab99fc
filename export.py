"""A checkpoint as a folder for other programs, whatever topology it was trained on.

python export.py RUN_DIR OUT                              the newest checkpoint
python export.py RUN_DIR OUT --checkpoint step-00000100   another one
"""

import argparse
import logging
import sys
from pathlib import Path

from common.command_line import CommandParser
from common.output import outlive_output, run_program
from data.modules import add_trust_flags, import_named
from launch.records import FORMS, OPEN_CLIP, read_export


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="export.py",
        description="Write a checkpoint as a folder with safetensors, tokenizer, preprocessing and "
        "modeling_export.py, which loads it with public libraries. transformers' CLIPModel, "
        "SiglipModel, Siglip2Model, ChineseCLIPModel or ClapModel loads it, too, where one of them "
        "has the same towers.",
    )
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run of train.py")
    add("out", type=Path, metavar="OUT", help="folder to make")
    about = "folder below RUN_DIR/checkpoints (default: the newest)"
    add("--checkpoint", metavar="NAME", help=about)
    about = "the moving average of the weights, where the run keeps one"
    add("--ema", action="store_true", help=about)
    about = "open_clip: what open_clip.create_model_and_transforms loads; auto: a model of "
    about += "transformers where it can be one, else a state dict under the towers' own names "
    add("--format", choices=FORMS, default="auto", help=about + "(default: auto)")
    about = (
        "of a run with adapters (LoRA): leave the weights as they were and write the adapters to "
    )
    about += "OUT/adapters, as peft's files (default: they are added to the weights)"
    add("--keep-adapters", action="store_true", help=about)
    add("--overwrite", action="store_true", help="replace an earlier export in OUT")
    about = "log OUT as an artifact of the run in Weights & Biases; without a login, offline. A project "
    about += (
        "or team that the run names counts where WANDB_PROJECT and WANDB_ENTITY name it, too, or "
    )
    about += "with --trust-run"
    add("--wandb", action="store_true", help=about)
    add_trust_flags(parser)
    return parser


# before torch is imported, which takes seconds: --help and mistakes do not wait
if __name__ == "__main__":
    outlive_output()
    ARGUMENTS = make_parser().parse_args()

from launch.exporting.inputs import PIPELINE_TOKENS, is_padded_otherwise
from launch.exporting.writing import CODE, CODE_OF, refuse_to_overwrite, write_export
from launch.inference.trained import open_run
from launch.tracking.destination import Destination, where_recorded
from launch.tracking.wandb_run import log_export
from models.weights.names import MOMENTS, REGIONS


def main(arguments: argparse.Namespace) -> None:
    import_named(arguments)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    refuse_to_overwrite(arguments.out, arguments.overwrite)
    if read_export(arguments.run_dir) is not None:
        raise ValueError(
            f"{arguments.run_dir}: is an export already; give the folder of the run it came from"
        )
    trained = open_run(arguments.run_dir, arguments.checkpoint, averaged=arguments.ema)
    place: Destination = {}
    if arguments.wandb:
        place = where_recorded(trained.record, arguments.run_dir, arguments.trust_run)
    differences = write_export(
        trained,
        arguments.out,
        arguments.overwrite,
        form=arguments.format,
        averaged=arguments.ema,
        keep_adapters=arguments.keep_adapters,
    )
    text, most = trained.by_branch["text"], trained.options["max_text_tokens"]
    if not differences and arguments.format != OPEN_CLIP and is_padded_otherwise(text, most):
        print(
            f"transformers' pipeline and processor pad texts to {PIPELINE_TOKENS} tokens, and this "
            f"model reads {most}: they score otherwise or refuse it; the README.md has what to call"
        )
    if differences:
        loader = arguments.out / CODE.name
        print(f"a state dict, because {'; '.join(differences)}: {loader} loads it")
    if (arguments.out / REGIONS).exists() and not (
        arguments.out / CODE_OF["regions"].name
    ).exists():
        print(f"{REGIONS}: for Wye alone, because no module of the library makes a map it reads")
    if (arguments.out / MOMENTS).exists():
        print(f"{MOMENTS}: for Wye alone, which goes on with it by --import")
    if arguments.wandb:
        log_export(trained, arguments.run_dir, arguments.out, arguments.ema, place)
    print(arguments.out)


if __name__ == "__main__":
    sys.exit(run_program("export.py", lambda: main(ARGUMENTS)))
