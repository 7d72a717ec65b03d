"""The parts of ``elastic_soak.py``: a cluster and its faults, the training, the samples, the proof, the timeline."""
