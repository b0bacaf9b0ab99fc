"""A data set whose texts have a language: for towers that tell languages apart."""

from data.index.sources import open_source


class Spoken:
    """240 emoji with German names; of three quarters the language is said, by a number."""

    def __init__(self):
        self.emoji = open_source("demo:de")

    def __len__(self):
        return 240

    def __getitem__(self, i):
        item = {"image": self.emoji.value("image", i), "text": self.emoji.captions(i)[0]}
        return item | ({"language": i % 3} if i % 4 else {})
