"""The names of augmentations of sounds. Imports nothing, so that the command line knows them before
any library is read."""

AUGMENTATIONS = ("crop", "spec", "noise")
