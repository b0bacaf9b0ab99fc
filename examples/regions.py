"""A data set of one's own with boxes: pictures of four emoji, each with its box, its names and a
name that is not its own.

    python train.py --data python:examples.regions:Sheets --pairs image:text,region:text

Boxes follow the crops and turns of training by themselves. `data/README.md` has the formats of
files with boxes.
"""

import io

from PIL import Image

from data.index.sources import open_source

SIDE = 64  # pixels of an emoji, of which a sheet has two rows of two
NUMBER = 240  # of sheets


class Sheets:
    """Item i is the same whenever it is asked for. An item without `regions`, or with None, takes
    part in the other pairs."""

    def __init__(self):
        self.emoji = open_source("demo")

    def __len__(self):
        return NUMBER

    def __getitem__(self, i):
        # some emoji far from each other, so that their names differ
        shown = [i + quarter * len(self.emoji) // 4 for quarter in range(4)]
        names = [self.emoji.captions(each) for each in shown]
        sheet, regions = Image.new("RGB", (2 * SIDE, 2 * SIDE), "white"), []
        for number, each in enumerate(shown):
            picture = Image.open(io.BytesIO(self.emoji.value("image", each))).convert("RGBA")
            place = (number % 2 * SIDE, number // 2 * SIDE)
            small = picture.resize((SIDE, SIDE))
            sheet.paste(small, place, small)
            regions.append(
                {
                    "box": [*place, SIDE, SIDE],  # x, y, width, height in pixels of the picture
                    "text": names[number],  # one phrase, or several
                    "negatives": names[number - 1][:1],  # the name of another one
                }
            )
        return {"image": sheet, "text": ", ".join(name[0] for name in names), "regions": regions}
