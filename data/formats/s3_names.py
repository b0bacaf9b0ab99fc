"""The keys of an S3 bucket, whatever their names, by boto3: obstore ends a listing at the first key
with an empty part (`a//b`) or one that is `.` or `..`, which it cannot ask for either."""

from __future__ import annotations

import importlib.util
import logging
import os

from common.secrets import redact


def can_list(root: str) -> bool:
    return root.startswith("s3") and importlib.util.find_spec("boto3") is not None


def listed_keys(root: str, folder: str, deep: bool) -> list[str]:
    """The keys in a folder of a bucket, `deep`: also below it, without those that cannot be asked
    for, of which the first is named. Errors: those of botocore."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    config = Config(signature_version=UNSIGNED) if _is("AWS_SKIP_SIGNATURE") else None
    given = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next(filter(None, map(os.environ.get, given)), None)
    client = boto3.client("s3", endpoint_url=endpoint, config=config)
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=root.partition("://")[2],
        Prefix=f"{folder}/" if folder else "",
        Delimiter="" if deep else "/",
    )
    keys, others, first = [], 0, ""
    for page in pages:
        found = [each["Key"] for each in page.get("Contents", ())]
        # of a folder that is not looked into, what its name begins with
        found += [each["Prefix"] for each in page.get("CommonPrefixes", ())]
        for key in found:
            parts = key.removesuffix("/").split("/")
            if not {"", ".", ".."} & {*parts}:
                keys.append(key)
            else:
                others, first = others + 1, first or key
    if others:
        logging.getLogger("wye").warning(
            "%s: %s is passed over%s: a name with an empty part, '.' or '..' cannot be asked for; "
            "rename it if it is a shard",
            redact(root),
            first,
            f", and {others - 1:,} more" if others > 1 else "",
        )
    return [key for key in keys if not key.endswith("/")]


def _is(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on")
