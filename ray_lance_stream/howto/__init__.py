"""How to: one page for each, to be read with ``help()``.

* ``help("ray_lance_stream.howto.splits")``: choose ``num_splits`` and the global batch
* ``help("ray_lance_stream.howto.pool")``: size the pool of prefetchers
* ``help("ray_lance_stream.howto.shrinking")``: shrink without running out of memory
* ``help("ray_lance_stream.howto.model_parallel")``: feed tensor-parallel and pipeline-parallel replicas
* ``help("ray_lance_stream.howto.moving")``: move from ``lancedb.streaming``
* ``help("ray_lance_stream.howto.restoring")``: restore on another cluster
* ``help("ray_lance_stream.howto.guarantees")``: what is guaranteed, and what is not

In their snippets ``uri`` is a database with a table "images" of 10,000 rows.
"""
