"""Numbers of bytes. Flags that take a size take GiB, and messages show KiB, MiB or GiB."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def sized(number: float) -> str:
    """`number` bytes in the largest unit of which there is one: 1.5 GiB, 12.0 MiB, 7 B."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,.0f} B"
