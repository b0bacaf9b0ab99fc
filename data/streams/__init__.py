"""Shards in any place, of which a bounded piece lies on the local disk."""
