"""How data sets are written: a file per kind, each of which lists rows; see
`data/formats/rows.py`."""
