"""Names in an export that those who write it and those who read it share. Imports nothing: the
command line reads it."""

FUSION = "fusion.safetensors"  # what scores pairs
REGIONS = "regions.safetensors"  # what embeds regions of images
MOMENTS = "moments.safetensors"  # what embeds moments of films
ANNOTATIONS = {"region": REGIONS, "moment": MOMENTS}
AUDIO = "audio.safetensors"  # the audio tower, beside a model of images and texts
OWN_TOWERS = "own_towers.safetensors"  # of modalities of one's own, beside such a model
TEXT_FOLDER = "text"  # the configuration of a text tower of transformers
