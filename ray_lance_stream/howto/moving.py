"""Move from ``lancedb.streaming``.

A program moves by its import line. Parameters, order of rows and state dicts are those of ``lancedb`` 0.40:

    from lancedb.streaming import StreamingDataLoader, StreamingDataset      # before
    from ray_lance_stream import StreamingDataLoader, StreamingDataset       # after

A checkpoint that LanceDB's class took in the middle of an epoch goes on with the next row:

>>> import itertools, lancedb, lancedb.streaming
>>> from ray_lance_stream import LanceStream, StreamingDataset
>>> table = lancedb.connect(uri).open_table("images")
>>> settings = dict(num_splits=4, shuffle_seed=42, columns=["id"])
>>> theirs = lancedb.streaming.StreamingDataset(table, **settings)
>>> begun = [row["id"] for row in itertools.islice(theirs, 400)]
>>> state = theirs.state_dict()

>>> ours = StreamingDataset(table, **settings)
>>> ours.load_state_dict(state)
>>> rest = [row["id"] for row in ours]
>>> len(begun), len(rest), len(set(begun + rest))
(400, 9600, 10000)

In Ray Train the state is given to a stream of LanceDB's order. It warns that a state of LanceDB does not say which
table it came from, so that this cannot be checked:

>>> stream = LanceStream(
...     uri, "images", num_splits=4, global_batch_size=40, shuffle_seed=42, columns=["id"], order="lancedb",
...     resume_from=state,
... )
>>> with stream.open() as shard:
...     trained = [row for batch in shard.iter_batches() for row in batch["id"].tolist()]
>>> trained == rest
True

* ``global_batch_size`` is new: the rows of a step on all workers, a multiple of ``num_splits``.
* With several ranks, merge their states first (``StreamingDataset.merge_state_dicts``). Ranks that stand at different
  cycles are an error here; LanceDB loses rows then. A state taken within a cycle (by batches no multiple of the
  splits a rank owns) goes on in ``StreamingDataset`` on one rank or on as many as took it, after as many batches each,
  not in ``LanceStream``.
* A *new* run need not keep LanceDB's order. ``LanceStream``'s own, ``order="feistel"``, starts at once whatever the
  size of the table.
* ``world_size`` need not divide ``num_splits``, and ``num_workers`` changes speed only.
"""
