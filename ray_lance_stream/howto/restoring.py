"""Restore on another cluster.

Everything a stream needs to go on is in ``lance_stream.json`` in the checkpoint, next to the weights: how far each
split is, and which table version, filter, seed and order that was. What is on a cluster (actors, blocks, plans) is not
needed.

* The same run, name and storage path: start it again. Ray Train finds the run's last checkpoint, and the stream reads
  its state from there. The number of workers may be another one.
  Do that too if a run stands still because "Ray has no room" for a worker whose node was lost while workers were being
  started (the progress line and ``ray-lance-stream status`` say so): Ray Train 2.60 waits then until another such node
  comes, even where it could go on with fewer.
* A new run: pass the checkpoint's path, URI or ``ray.train.Checkpoint`` as ``resume_from``. It counts until the new run
  has a checkpoint of its own. Until then ``ray.train.get_checkpoint()`` is None in the loop, so that the weights are
  the loop's to find; hand it the same checkpoint, here as a directory that every worker sees:

    stream = LanceStream(..., resume_from="/shared/runs/old/checkpoint_12")
    trainer = TorchTrainer(train_loop, train_loop_config={"begin_with": "/shared/runs/old/checkpoint_12"})

    def train_loop(config):
        checkpoint = ray.train.get_checkpoint() or Checkpoint.from_directory(config["begin_with"])
        with checkpoint.as_directory() as directory:
            net.load_state_dict(torch.load(f"{directory}/model.pt")["model"])

  A worker that begins so without a checkpoint says it in its log, where the stream stands and that weights are missing.

The table may have moved. A copy of it, files and versions, is the same table under any URI:

>>> import json, shutil
>>> from ray_lance_stream import LanceStream
>>> settings = dict(num_splits=48, global_batch_size=480, shuffle_seed=42)
>>> with LanceStream(uri, "images", **settings).open() as shard:
...     batches = iter(shard.iter_batches())
...     first, state = next(batches), json.dumps(shard.state_dict())
...     second = next(batches)["id"].tolist()

>>> copied = shutil.copytree(uri, uri + "-copied")
>>> with LanceStream(copied, "images", **settings, resume_from=json.loads(state)).open(world_size=5) as shard:
...     shard.step, next(iter(shard.iter_batches()))["id"].tolist()[:9] == second[:9]
(1, True)

What was written to the table since makes no difference: the state names its version, and the stream returns to it. So
that version must be kept: copy a table with its versions, and do not clean up versions that a run has begun on. A table
that was written anew from the same rows is another one, and is refused:

>>> import lancedb, pytest
>>> from ray_lance_stream import StateMismatchError
>>> rows = lancedb.connect(uri).open_table("images").to_arrow()
>>> anew = lancedb.connect(uri + "-anew").create_table("images", rows)
>>> with pytest.raises(StateMismatchError):
...     LanceStream(uri + "-anew", "images", **settings, resume_from=json.loads(state)).open().epoch

``allow_changes=("table",)`` accepts it, if you know that its rows are the same in the same order.

``ray-lance-stream inspect CHECKPOINT`` shows what a checkpoint says, without a cluster; the run's directory stands for
its newest one.
"""
