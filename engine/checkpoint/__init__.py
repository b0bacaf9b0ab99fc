"""Checkpoints that are whole or do not count, and that any topology reads.

layout        what a checkpoint's folder holds, and whether it is whole            files only, no process group
reading       tensors by kind and name, whatever topology wrote them               "
writing       one rank's files; the manifest and the one rename that make it count "
retention     which ones stay, what is put aside, room on the disk                 "
engine_state  an engine's state as fragments of named tensors, and back            one rank
together      what all ranks do together: save in the background, check, go on     collectives, threads
"""
