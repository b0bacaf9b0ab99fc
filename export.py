"""A checkpoint as a folder for other programs, whatever topology it was trained on.

python export.py RUN_DIR OUT                              the newest checkpoint
python export.py RUN_DIR OUT --checkpoint step-00000100   another one
"""

import argparse
import logging
import sys
from pathlib import Path

from common.output import outlive_output, run_program
from data.modules import add_trust_flags, import_named
from launch.exporting.writing import FORMATS, refuse_to_overwrite, write_export
from launch.inference.trained import open_run
from launch.run.records import read_export
from launch.tracking.artifacts import log_export


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="export.py",
        description="Write a checkpoint as a folder with safetensors, tokenizer and preprocessing: one that transformers' "
        "CLIPModel, SiglipModel, Siglip2Model, ChineseCLIPModel, VisionTextDualEncoderModel or ClapModel loads where one of them has the same towers, "
        "else one whose README.md loads it with torchvision and transformers.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run of train.py")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="folder below RUN_DIR/checkpoints (default: the newest)",
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="the moving average of the weights, where the run keeps one",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="auto",
        help="open_clip: what open_clip.create_model_and_transforms loads; auto: a model of transformers where it can be one, else a state dict "
        "under the towers' own names (default: auto)",
    )
    parser.add_argument(
        "--keep-adapters",
        action="store_true",
        help="of a run with adapters (LoRA): leave the weights as they were and write the adapters to OUT/adapters, as peft's files "
        "(default: they are added to the weights)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in OUT")
    parser.add_argument(
        "--wandb",
        action="store_true",
        help="log OUT as an artifact of the run in Weights & Biases; without a login, offline",
    )
    add_trust_flags(parser)
    return parser


def main(arguments: argparse.Namespace) -> None:
    import_named(arguments)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    refuse_to_overwrite(arguments.out, arguments.overwrite)
    if read_export(arguments.run_dir) is not None:
        raise ValueError(
            f"{arguments.run_dir}: is an export already; give the folder of the run it came from"
        )
    trained = open_run(arguments.run_dir, arguments.checkpoint, averaged=arguments.ema)
    differences = write_export(
        trained,
        arguments.out,
        arguments.overwrite,
        form=arguments.format,
        averaged=arguments.ema,
        keep_adapters=arguments.keep_adapters,
    )
    if differences:
        print(
            "a state dict, because "
            + "; ".join(differences)
            + f": {arguments.out / 'README.md'} loads it"
        )
    if arguments.wandb:
        log_export(trained, arguments.run_dir, arguments.out, averaged=arguments.ema)
    print(arguments.out)


if __name__ == "__main__":
    outlive_output()
    sys.exit(run_program("export.py", lambda: main(make_parser().parse_args())))
